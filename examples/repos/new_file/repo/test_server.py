from server import address


def test_address():
    assert address() == "localhost:8080"
