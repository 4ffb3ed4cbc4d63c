"""The shop's tables."""

from django.db import models


class Customer(models.Model):
    name = models.CharField(max_length=100, unique=True)


class Order(models.Model):
    customer = models.ForeignKey(Customer, models.PROTECT)
    total_cents = models.PositiveIntegerField()
