"""The ServerApp: the server of the folder that the run config names."""

from pathlib import Path

from noisegate.flower import MessageServer, server_app

app = server_app(lambda context: MessageServer.of(Path(str(context.run_config["folder"]))))
