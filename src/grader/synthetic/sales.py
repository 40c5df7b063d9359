"""Sales data, made by a seed, and the right answers to the assignment about it."""

import random

import msgspec

REGIONS = ("east", "north", "south", "west")


class Sale(msgspec.Struct, frozen=True):
    region: str
    units: int
    price: float

    @property
    def revenue(self) -> float:
        return self.units * self.price


class SalesData(msgspec.Struct, frozen=True):
    sales: tuple[Sale, ...]

    @property
    def csv(self) -> str:
        lines = [f"{sale.region},{sale.units},{sale.price:.2f}" for sale in self.sales]
        return "\n".join(["region,units,price", *lines, ""])

    @property
    def total(self) -> float:
        return round(sum(sale.revenue for sale in self.sales), 2)

    @property
    def average(self) -> float:
        return round(sum(sale.revenue for sale in self.sales) / len(self.sales), 2)

    @property
    def by_region(self) -> dict[str, float]:
        return {
            region: round(sum(sale.revenue for sale in self.sales if sale.region == region), 2) for region in REGIONS
        }


def make_sales(seed: int, count: int = 40) -> SalesData:
    chance = random.Random(seed)
    sales = [Sale(chance.choice(REGIONS), chance.randint(1, 20), chance.randint(100, 5000) / 100) for _ in range(count)]
    fixed = [Sale(region, 1, 10.0) for region in REGIONS]  # every region is there
    return SalesData((*fixed, *sales))
