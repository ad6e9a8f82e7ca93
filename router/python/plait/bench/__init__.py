"""`plait bench`: a load generator for any OpenAI-compatible server.

Read in this order:

1. `settings`, `cli`: the flags, and the commands serve, latency, throughput and sweep.
2. `cases`, `profiles`, `datasets`, `lengths`, `pace`, `prompts`, `load`: what will be sent, decided before a run.
3. `measure`, `server`: one benchmark; the server is probed, warmed up and measured case by case.
4. `run`, `client_pool`, `messages`: one run. This process schedules; client processes send.
5. `client`, `connection`, `response`: a client process, from the socket to the tokens of a stream.
6. `metrics`, `percentiles`, `slo`, `client_lag`: what a run says, and whether the client was fast enough.
7. `table`, `compare`, `sweep`, `report`, `result_file`, `plots`: output.
"""
