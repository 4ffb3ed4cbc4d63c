-- A trigger that writes an event for each change of a table: for manual changes, and for software that can't be changed.
--
--     pip install 'outbox-kafka[relay]'
--     export OUTBOX_DATABASE_URL=postgresql://localhost/shop
--     outbox db upgrade
--     psql "$OUTBOX_DATABASE_URL" --command='CREATE ROLE shop LOGIN' --command='CREATE SCHEMA shop AUTHORIZATION shop'
--     outbox db roles writer=shop --apply        # shop: the owner of the table
--     psql "$OUTBOX_DATABASE_URL" --username=shop --single-transaction --file=trigger.sql

CREATE TABLE products (sku text PRIMARY KEY, name text NOT NULL, cents integer NOT NULL);

CREATE FUNCTION announce_product() RETURNS trigger LANGUAGE plpgsql
-- It runs with the rights of its owner: a role that changes a product needs no rights on the outbox.
SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    who jsonb := jsonb_build_object('changed-by', session_user);
BEGIN
    -- Another sku is another key: the old one is gone, the new one is there.
    IF TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND NEW.sku <> OLD.sku THEN
        INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, headers)
        VALUES ('Product', OLD.sku, 'ProductRemoved', who);
    END IF;
    -- No event for an UPDATE that changes nothing.
    IF TG_OP <> 'DELETE' AND NEW IS DISTINCT FROM OLD THEN
        INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, headers)
        VALUES ('Product', NEW.sku, 'ProductChanged',
                jsonb_build_object('name', NEW.name, 'cents', NEW.cents), who);
    END IF;
    RETURN NULL;
END
$$;
-- Otherwise every role could write such events, from a table of its own.
REVOKE EXECUTE ON FUNCTION announce_product() FROM PUBLIC;

-- AFTER: the row is locked by then, until the transaction ends. So a product's events are in the order of the commits.
CREATE TRIGGER announce_product AFTER INSERT OR UPDATE OR DELETE ON products
    FOR EACH ROW EXECUTE FUNCTION announce_product();
