from shop import calc_total
from shop.report import summary


def test_total():
    assert calc_total([(100, 2), (50, 1)]) == 250


def test_summary():
    assert summary("Ada", [(1999, 1)]) == "Ada: 19.99"
