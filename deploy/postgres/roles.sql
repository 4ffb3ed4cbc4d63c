-- The roles of docker-compose.yml, made when the cluster is initialized. What each may do: `outbox db roles`.
CREATE ROLE outbox_migrator LOGIN PASSWORD 'outbox';
CREATE ROLE outbox_relay LOGIN PASSWORD 'outbox';
CREATE ROLE outbox_page LOGIN PASSWORD 'outbox';
-- A service and a consumer own the tables of their own.
CREATE ROLE outbox_shop LOGIN PASSWORD 'outbox';
CREATE SCHEMA shop AUTHORIZATION outbox_shop;
-- It asks for its schema at each start, which needs this right even where the schema is there.
GRANT CREATE ON DATABASE postgres TO outbox_shop;
CREATE ROLE outbox_consumer LOGIN PASSWORD 'outbox';
GRANT CREATE ON SCHEMA public TO outbox_consumer;
