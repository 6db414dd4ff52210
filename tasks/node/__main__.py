"""Run the agent of one machine: `python -m node`."""

from .agent import main

if __name__ == "__main__":
    main()
