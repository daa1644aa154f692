"""Other people's trainers on streamed models."""
