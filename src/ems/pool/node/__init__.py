"""The daemon of one host.

``pool_node`` (puts it together, lets clients in, hands over), ``listener`` and ``connection`` (clients, one by one),
``requests`` (what greeted clients ask), ``memory`` (touches and replaces the memory of segments), ``steward`` (an
administrator's work), ``audit`` and ``experience_file`` (what is written down), ``launcher`` (starts a node),
``succession`` (hands it over to another process).
"""
