"""PaddleFleetX's GPT: ``fleetx``."""
