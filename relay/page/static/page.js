// Live figures: when the server says that there are new ones, the parts of the view that are marked with data-live are
// fetched again and replaced. Without this script everything works, but for that, copy buttons, and cards on a phone.
"use strict";

(() => {
  const base = document.body.dataset.base;
  const state = document.getElementById("live-state");
  let busy = false;
  let source = null;
  let again = null;

  const parts = (root) => new Map([...root.querySelectorAll("[data-live]")].map((part) => [part.dataset.live, part]));

  // On a phone a row is a card, and each value in it needs the name of its column.
  const label = (root) => {
    for (const table of root.querySelectorAll("table:has(thead)")) {
      const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
      for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => (cell.dataset.label = names[at]));
    }
  };
  label(document);

  const copyable = navigator.clipboard ? document.querySelectorAll("[data-copy]") : [];
  for (const part of copyable) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(part.textContent);
      button.textContent = "Copied";
    });
    part.before(button);
  }

  // What a user has selected or is about to press must not vanish, nor a figure that they read.
  const inUse = (part) => {
    const selection = getSelection();
    const inside = document.activeElement !== part && part.contains(document.activeElement);
    const selected = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
    return inside || selected || part.querySelector("rect:hover");
  };

  const refresh = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      // An event that nobody knows yet may be known later.
      if (!answer.ok && answer.status !== 404) throw new Error(`the answer is ${answer.status}; load the page again`);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      label(fresh);
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

  const close = () => {
    clearTimeout(again);
    if (source) source.close();
    source = null;
  };

  // A browser has few connections to one server: only the tab that is looked at keeps one.
  const open = () => {
    close();
    source = new EventSource(`${base}/live`);
    let first = true;
    source.onmessage = () => {
      // The first one is what the view was made of.
      if (!first) refresh();
      first = false;
    };
    source.onerror = () => {
      first = false;
      state.textContent = "not live: connection lost, reconnecting";
      // After an answer that is an error, a browser does not reconnect by itself.
      if (source && source.readyState === EventSource.CLOSED) again = setTimeout(resume, 3000);
    };
  };

  const resume = () => {
    refresh();
    open();
  };

  if (document.querySelector("[data-live]")) {
    if (!document.hidden) open();
    document.addEventListener("visibilitychange", () => (document.hidden ? close() : resume()));
  }
})();
