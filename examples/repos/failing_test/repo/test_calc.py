from calc import add, scale


def test_add():
    assert add(2, 3) == 5


def test_scale():
    assert scale(4, 3) == 12
