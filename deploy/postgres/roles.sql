-- The roles of docker-compose.yml, made when the cluster is initialized. What each may do: `outbox db roles`.
SET search_path = pg_catalog;
-- Who may create in a schema of another role's search path can plant functions there that the other role calls. So nobody
-- creates in public; Postgres 15 and later have it so, an upgraded database has not.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
CREATE ROLE outbox_migrator LOGIN PASSWORD 'outbox';
CREATE ROLE outbox_relay LOGIN PASSWORD 'outbox';
CREATE ROLE outbox_page LOGIN PASSWORD 'outbox';
-- A service and a consumer have schemas of their own. The consumer's has its role's name, with which its path begins.
CREATE ROLE outbox_shop LOGIN PASSWORD 'outbox';
CREATE SCHEMA shop AUTHORIZATION outbox_shop;
-- It asks for its schema at each start, which needs this right even where the schema is there.
GRANT CREATE ON DATABASE postgres TO outbox_shop;
CREATE ROLE outbox_consumer LOGIN PASSWORD 'outbox';
CREATE SCHEMA outbox_consumer AUTHORIZATION outbox_consumer;
