"""A pool over many hosts in virtual time: real brains where EMS decides, models where others do, no bytes.

``plan`` (what is simulated), ``network`` (its constants, and how a busy link stretches transfers), ``workload`` (which
requests come when), ``routing`` (to which host), ``master`` (Mooncake's master as it places and evicts), ``cluster``
(hosts with the brain of their node, and what one request does), ``simulation`` (a whole run, the loss of hosts),
``report`` and ``plot`` (what people see).  All but the last are brains.
"""
