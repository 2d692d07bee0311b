"""Greets its argument."""

import sys


def greeting(name):
    message = f"Hello, {name}!"
    return mesage


if __name__ == "__main__":
    print(greeting(sys.argv[1] if len(sys.argv) > 1 else "world"))
