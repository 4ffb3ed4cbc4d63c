"""Settings: Django's PostgreSQL backend with psycopg 3. The variables of libpq, such as PGHOST, name the server."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "of an example")
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["outbox.django", "shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
OUTBOX = {"SCHEMA": "outbox", "LANES": 4, "DATABASE": "default"}  # as it is without them
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ.get("PGDATABASE", "shop")}}
