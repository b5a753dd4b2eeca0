"""The Tinker REST API over HTTP, so that the stock ``tinker`` SDK trains against an engine."""

from spindle.server.app import create_app
from spindle.server.serve import running, serve
from spindle.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app", "running", "serve"]
