"""A Django project whose orders and events are committed together.

Run it in a shell:

    pip install 'outbox-kafka[django]'
    export PGDATABASE=shop PGHOST=localhost PGUSER=shop
    python manage.py migrate
    python manage.py place_order Ann 4200
    python manage.py runserver
    python manage.py test
"""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
    execute_from_command_line(sys.argv)
