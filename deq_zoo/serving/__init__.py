"""A small server for trained models: `deq-zoo serve RUN`. It needs the extra `serve`."""
