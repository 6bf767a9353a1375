"""How many replicas a deployment has: a policy in plain code, its binding to Ray Serve, its replay in simulated time.

* ``config``: what a deployment file says.
* ``policy``, ``demand``: observations in, a number of replicas and its reason out. No Ray, no clock.
* ``load``, ``device``: what a replica tells about itself.
* ``serve_policy``: the policy as Ray Serve's controller calls it.
* ``replay``, ``rivals``: a day of arrivals against a policy, and the policies to compare with.
"""
