// Live figures: when the server says that there are new ones, the parts of the view that are marked with data-live are
// fetched again and replaced. Without this script everything works, but for that.
"use strict";

(() => {
  const base = document.body.dataset.base;
  const state = document.getElementById("live-state");
  let busy = false;
  let due = false;

  const parts = (root) => new Map([...root.querySelectorAll("[data-live]")].map((part) => [part.dataset.live, part]));

  // What somebody has selected or is about to press must not vanish under their hands.
  const inUse = (part) => {
    const selection = getSelection();
    const inside = document.activeElement !== part && part.contains(document.activeElement);
    return inside || (selection && !selection.isCollapsed && part.contains(selection.anchorNode));
  };

  const refresh = async () => {
    if (busy || document.hidden) {
      due = true;
      return;
    }
    busy = true;
    due = false;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const found = parts(fresh);
      for (const [name, part] of parts(document)) {
        const next = found.get(name);
        if (next && !inUse(part) && next.innerHTML !== part.innerHTML) part.replaceChildren(...next.childNodes);
      }
      state.textContent = fresh.getElementById("live-state").textContent;
    } catch (error) {
      state.textContent = `not live: ${error.message}`;
    } finally {
      busy = false;
    }
  };

  if (document.querySelector("[data-live]")) {
    const source = new EventSource(`${base}/live`);
    let first = true;
    source.onmessage = () => {
      // The first one is what the view was made of.
      if (!first) refresh();
      first = false;
    };
    source.onerror = () => {
      state.textContent = "not live: the connection is lost, and tried again";
      first = false;
    };
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && due) refresh();
    });
  }
})();
