"""Balanced mode: the load of a queue is the number of its open leases, kept on Redis or Valkey by scripts.

balancer.py     LoadBalancer, what a user calls
publishing.py   every publish opens a pending lease, and gives it back if it fails
executions.py   signals of a worker: a start turns a pending lease into a running one, an end closes it
heartbeat.py    a thread of a worker: what it consumes and runs
reconciler.py   compares pending leases with the messages in the broker
leases.py       typed access to the scripts in lua/
connection.py   one connection for each process, with a circuit breaker
"""
