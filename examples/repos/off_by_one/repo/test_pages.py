from pages import page, page_count


def test_count():
    assert page_count(10, 5) == 2
    assert page_count(11, 5) == 3
    assert page_count(0, 5) == 0


def test_page():
    assert page([1, 2, 3, 4, 5], 1, 2) == [1, 2]
    assert page([1, 2, 3, 4, 5], 3, 2) == [5]
