"""`python -m launch` is `ridge`."""

from launch.cli import main

if __name__ == "__main__":
    main()
