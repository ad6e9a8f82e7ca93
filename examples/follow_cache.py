"""Follow which pages a server has cached, from its KV events.

Start a server with `--kv-events-endpoint tcp://127.0.0.1:5557 --kv-events-replay-endpoint tcp://127.0.0.1:5558`.
docs/kv-events.md describes the messages.
"""

import argparse

import msgspec
import zmq

END = -1


class CachedPages:
    """The hashes of a server's cached pages, by cache kind."""

    def __init__(self, events: str, replay: str, topic: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.events = context.socket(zmq.SUB)
        self.events.connect(events)
        self.events.subscribe(topic)
        self.replay = context.socket(zmq.DEALER)
        self.replay.setsockopt(zmq.RCVTIMEO, 30_000)
        self.replay.connect(replay)
        self.last = END
        """Number of the last message that was applied."""
        self.pages: set[tuple[int, bytes]] = set()

    def fetch_all(self) -> None:
        """Ask for all pages: at the start, and after a gap."""
        self.replay.send_multipart([b"", bytes(8)])
        number = 0
        while number != END:
            _, raw_number, message = self.replay.recv_multipart()
            number = int.from_bytes(raw_number, "big", signed=True)
            if number != END:
                self.last = number
                self.apply(message)

    def follow(self, timeout_ms: int) -> bool:
        """Take the next message; False if none comes in time."""
        if not self.events.poll(timeout_ms):
            return False
        _topic, raw_number, message = self.events.recv_multipart()
        number = int.from_bytes(raw_number, "big", signed=True)
        if number == self.last + 1:
            self.last = number
            self.apply(message)
        elif number > self.last:
            self.fetch_all()
        return True

    def apply(self, message: bytes) -> None:
        """Apply the events of one message."""
        for event in msgspec.msgpack.decode(message)["events"]:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.pages.clear()
                continue
            pages = {(event["group_idx"], page) for page in event["block_hashes"]}
            if kind == "BlockStored":
                self.pages |= pages
            else:
                self.pages -= pages


def main() -> None:
    """Print the number of cached pages whenever it changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", default="tcp://127.0.0.1:5557", help="address of the events")
    parser.add_argument("--replay", default="tcp://127.0.0.1:5558", help="address that answers with all pages")
    parser.add_argument("--topic", default="", help="the server's --kv-events-topic")
    parser.add_argument("--seconds", type=float, default=0, help="end after a pause of this length; 0 never ends")
    options = parser.parse_args()
    cached = CachedPages(options.events, options.replay, options.topic)
    cached.fetch_all()
    print(f"{len(cached.pages)} pages", flush=True)
    while cached.follow(int(options.seconds * 1000) or -1):
        print(f"{len(cached.pages)} pages", flush=True)


if __name__ == "__main__":
    main()
