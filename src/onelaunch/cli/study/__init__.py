"""``onelaunch study``: one module per command."""
