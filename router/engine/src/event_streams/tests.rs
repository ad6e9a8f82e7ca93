use std::io::Read;
use std::os::unix::net::UnixStream;

use super::*;
use crate::output_queue::{OutputQueue, records};

const LIMIT: Duration = Duration::from_secs(30);
const START: Micros = Micros(0);

/// One announced stream, its client, and its first record with Python.
struct Begun {
    streams: EventStreams,
    server: UnixStream,
    client: UnixStream,
}

fn packed(flags: u8, text: &str) -> Vec<u8> {
    let mut packed = Vec::new();
    append_record(&mut packed, 7, |payload| {
        payload.extend_from_slice(text.as_bytes());
        ((), flags)
    });
    packed
}

impl Begun {
    fn new(max_unsent_bytes: usize) -> Self {
        let queue = OutputQueue::new(1000).unwrap();
        let (server, client) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let mut begun = Self {
            streams: EventStreams::new(Writable::new(&queue).unwrap()),
            server,
            client,
        };
        begun.streams.announce(7, max_unsent_bytes);
        begun.take(0, "first");
        assert_eq!(begun.for_python(), packed(0, "first"));
        begun
    }

    fn take(&mut self, flags: u8, text: &str) {
        let packed = packed(flags, text);
        let all: Vec<_> = records(&packed).collect();
        let [record] = all[..] else {
            panic!("one record was packed")
        };
        self.streams.take(&record);
    }

    fn hand_over(&mut self) {
        let socket = self.server.try_clone().unwrap();
        self.streams.hand_over(7, socket.into(), LIMIT);
        self.streams.send(START);
    }

    fn for_python(&mut self) -> Vec<u8> {
        std::mem::take(self.streams.for_python())
    }

    /// What the client can read now.
    fn read(&mut self) -> String {
        let mut read = Vec::new();
        let mut buffer = [0; 65_536];
        while let Ok(num @ 1..) = self.client.read(&mut buffer) {
            read.extend_from_slice(&buffer[..num]);
        }
        String::from_utf8(read).unwrap()
    }

    /// Writes to a client that reads nothing until its socket is full.
    fn fill_socket(&mut self) {
        while !self.streams.has_stalled() {
            self.take(0, &"x".repeat(9_999));
            self.streams.send(START);
        }
    }
}

#[test]
fn python_writes_the_first_and_the_last_record_and_the_socket_gets_the_rest() {
    let mut begun = Begun::new(1000);
    begun.hand_over();
    begun.take(0, "second, of 20 bytes.");
    begun.streams.send(START);
    assert_eq!(begun.read(), "14\r\nsecond, of 20 bytes.\r\n");
    begun.take(LAST, "last");
    begun.streams.send(START);
    assert_eq!(begun.for_python(), packed(LAST, "last"));
    assert_eq!(begun.read(), "");
}

#[test]
fn a_record_of_use_goes_to_python_and_never_to_the_socket() {
    let mut begun = Begun::new(1000);
    begun.hand_over();
    begun.take(USED, "8 bytes.");
    begun.streams.send(START);
    assert_eq!(begun.for_python(), packed(USED, "8 bytes."));
    assert_eq!(begun.read(), "");
}

#[test]
fn records_wait_in_their_order_for_the_socket() {
    let mut begun = Begun::new(1000);
    for text in ["a", "b"] {
        begun.take(0, text);
    }
    begun.take(LAST, "last");
    begun.streams.send(START);
    assert_eq!(begun.for_python(), b"");
    begun.hand_over();
    assert_eq!(begun.read(), "1\r\na\r\n1\r\nb\r\n");
    assert_eq!(begun.for_python(), packed(LAST, "last"));
}

#[test]
fn a_stream_that_ends_with_its_first_record_is_pythons_alone() {
    let queue = OutputQueue::new(1000).unwrap();
    let mut streams = EventStreams::new(Writable::new(&queue).unwrap());
    streams.announce(7, 1000);
    let packed = packed(LAST, "whole");
    for record in records(&packed) {
        streams.take(&record);
    }
    assert_eq!(*streams.for_python(), packed);
    assert!(streams.streams.is_empty());
}

#[test]
fn streams_that_nobody_announced_are_pythons() {
    let mut begun = Begun::new(1000);
    begun.streams.release(7);
    begun.take(0, "text");
    assert_eq!(begun.for_python(), packed(0, "text"));
}

#[test]
fn a_full_socket_goes_on_when_the_client_reads() {
    let mut begun = Begun::new(1 << 20);
    begun.hand_over();
    begun.fill_socket();
    begun.take(LAST, "last");
    begun.streams.send(START);
    assert_eq!(begun.for_python(), b"", "bytes before it are unsent");
    let mut read = begun.read();
    let mut writable = Vec::new();
    begun.streams.writable().wait(None, &mut writable);
    assert_eq!(writable, [7]);
    begun.streams.resume(&writable, START);
    read += &begun.read();
    assert!(read.ends_with("x\r\n"));
    assert_eq!(
        read.matches("270f\r\n").count() * 9_999,
        read.matches('x').count()
    );
    assert_eq!(begun.for_python(), packed(LAST, "last"));
    assert!(!begun.streams.has_stalled());
}

#[test]
fn a_client_that_leaves_too_much_unread_is_cut_off() {
    let mut begun = Begun::new(100_000);
    begun.hand_over();
    begun.fill_socket();
    let mut num_more = 0;
    while begun.streams.take_unread().is_empty() {
        begun.take(0, &"x".repeat(9_999));
        num_more += 1;
    }
    assert!((9..=12).contains(&num_more));
    begun.take(0, "dropped");
    assert!(begun.streams.take_unread().is_empty(), "it is aborted once");
    begun.read();
    begun.streams.resume(&[7], START);
    assert!(!begun.read().contains("dropped"));
    assert_eq!(begun.for_python(), packed(LAST | TOO_SLOW, ""));
}

#[test]
fn a_socket_that_takes_nothing_for_too_long_is_shut_down() {
    let mut begun = Begun::new(1 << 20);
    begun.hand_over();
    begun.fill_socket();
    begun.streams.end_stalled(Micros(29_999_999));
    assert!(begun.streams.has_stalled());
    begun.streams.end_stalled(Micros(30_000_000));
    assert!(!begun.streams.has_stalled());
    begun.read();
    assert_eq!(begun.client.read(&mut [0; 8]).unwrap(), 0, "its end");
    assert_eq!(begun.for_python(), packed(LAST | GONE, ""));
    assert_eq!(begun.streams.take_unread(), [7]);
}

#[test]
fn python_and_the_scheduler_hear_of_a_client_that_left() {
    let mut begun = Begun::new(1000);
    begun.hand_over();
    begun.client.shutdown(std::net::Shutdown::Both).unwrap();
    begun.take(0, "a");
    begun.streams.send(START);
    assert_eq!(begun.for_python(), packed(LAST | GONE, ""));
    assert_eq!(begun.streams.take_unread(), [7]);
}

#[test]
fn comments_go_to_streams_that_wait() {
    let mut begun = Begun::new(1000);
    begun.streams.comment(b": hm\n\n");
    begun.hand_over();
    assert_eq!(begun.read(), "", "Python may still write");
    begun.streams.comment(b": hm\n\n");
    begun.streams.send(START);
    assert_eq!(begun.read(), "6\r\n: hm\n\n\r\n");
}
