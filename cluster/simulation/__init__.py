"""A mesh in one process under a simulated clock: production services, with time, network and stores replaced.

::

    world = draw_world(seed)          # what will happen: requests, faults, a roll-out; plain data
    report = simulate(world)          # runs it, some milliseconds a world
    violations = check(report)        # safety and liveness

``python -m cluster.simulation --seed 0 --count 1000`` runs many, and makes a world that breaks a rule smaller.
"""
