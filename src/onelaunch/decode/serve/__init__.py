"""OpenAI-compatible server of one model on one device: requests, queue, metrics, HTTP application.

Importing this package imports none of its modules. They need the extra ``serve``; only ``onelaunch serve`` and tests import them.
"""
