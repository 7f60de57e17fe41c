//! The behavior of a rank that waits for a connection, and of one that leaves.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::PollFlags,
    net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size},
};

use super::{pair, show_life};
use crate::error::{Certainty, Error};

use crate::socket::await_ready;
use crate::transport::tcp::Tcp;
use crate::transport::tcp::link::Link;
use crate::transport::tests::deadline;
use crate::transport::{
    Abort, CHUNK, ControlPlane, DataPlane, FinalMessage, LeaveKind, OpPhase, OutgoingChunk, Tag,
};
use crate::wire::{FrameKind, GroupId, Head};

/// The program may end right after the final message, and unread data would make the system discard that message.
#[test]
fn nothing_is_left_unread_after_the_last_word() {
    let (tcp, mut other) = pair();
    let link = tcp.links.get(1).unwrap();
    // The reading thread believes that an operation reads, and does not read itself.
    let _polling = tcp.handoff.enter();
    let mut others = [other.try_clone().unwrap()];
    await_that(|| {
        show_life(&mut others);
        link.has_unread()
    });
    tcp.leave(&FinalMessage::Goodbye(LeaveKind::Closed));
    assert!(!link.has_unread());
    let head = Head::read(&mut other).unwrap();
    assert_eq!(head.kind, FrameKind::Goodbye);
    // Nothing stays unread later either.
    for _ in 0..3 {
        show_life(&mut others);
        await_that(|| !link.has_unread());
    }
}

#[test]
fn who_only_sends_gets_on_with_every_piece() {
    const PIECE: usize = 64 * 1024;
    const PIECES: usize = 12;
    let (tcp, mut other) = pair();
    narrow(&tcp, &other);
    let mut deadline = deadline(4, Duration::from_secs(2));
    // The peer takes nearly twice as long as the deadline allows.
    let slow = thread::spawn(move || {
        for _ in 0..PIECES {
            thread::sleep(Duration::from_millis(300));
            other.read_exact(&mut [0; PIECE]).unwrap();
        }
        other
    });
    tcp.send(1, part(0, &[0; PIECE * PIECES]), &mut deadline, None)
        .unwrap();
    let _other = slow.join().unwrap();
}

#[test]
fn who_only_sends_gets_on_with_every_frame() {
    let (tcp, _other) = pair();
    let mut deadline = deadline(4, Duration::from_secs(50));
    for index in 0..3 {
        let since = deadline.since;
        tcp.send(1, part(index, &[0; 8]), &mut deadline, None)
            .unwrap();
        assert!(deadline.since > since);
    }
}

/// Otherwise, two ranks that write to each other would wait for each other.
#[test]
fn who_cannot_write_reads() {
    const PARTS: u32 = 16;
    let (tcp, mut other) = pair();
    narrow(&tcp, &other);
    // No reading thread helps.
    let _polling = tcp.handoff.enter();
    let peer = thread::spawn(move || {
        let payload = [1; CHUNK];
        other.set_write_timeout(Some(LONG)).unwrap();
        for index in 0..PARTS {
            let head = Head::new(FrameKind::Reduce, 4, index, &[], &payload);
            other.write_all(&head.encode()).unwrap();
            other.write_all(&payload).unwrap();
        }
        // The peer reads only after it has written everything.
        let mut frame = vec![0; Head::LEN + CHUNK];
        for _ in 0..PARTS {
            other.read_exact(&mut frame).unwrap();
        }
    });
    let mut deadline = deadline(4, LONG);
    for index in 0..PARTS {
        tcp.send(1, part(index, &[0; CHUNK]), &mut deadline, None)
            .unwrap();
    }
    peer.join().unwrap();
}

#[test]
fn trouble_wakes_who_waits_for_room() {
    let told = |_: &Tcp, other: &mut TcpStream| {
        let error = Error::misuse("it gave up".to_owned());
        let abort = Abort {
            group: GroupId::WORLD,
            sequence: 4,
            error,
        }
        .encode();
        let head = Head::new(FrameKind::Abort, 4, 0, &abort, &[]);
        other.write_all(&head.encode()).unwrap();
        other.write_all(&abort).unwrap();
    };
    let found = |tcp: &Tcp, _: &mut TcpStream| tcp.inbox.lost(1, "gone", Certainty::Settled);
    let troubles: [fn(&Tcp, &mut TcpStream); 2] = [told, found];
    for failure_text in troubles {
        let (tcp, mut other) = pair();
        narrow(&tcp, &other);
        let link = tcp.links.get(1).unwrap();
        fill(link);
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let until = Instant::now() + LONG;
                while tcp.inbox.has_no_failures() {
                    tcp.poll_until_writable(&tcp.poller, link, until, || {
                        !tcp.inbox.has_no_failures()
                    });
                }
                Instant::now() < until
            });
            await_that(|| tcp.handoff.nap().is_some());
            // This usually suffices for it to fall asleep, and it must wake in any case.
            thread::sleep(Duration::from_millis(50));
            failure_text(&tcp, &mut other);
            assert!(waits.join().unwrap(), "it slept on");
        });
    }
}

/// Data that a thread has read cannot be trusted after the thread panicked.
#[test]
fn a_panic_of_a_thread_that_reads_ends_the_group() {
    let (tcp, _other) = pair();
    let links = Arc::clone(&tcp.links);
    let panicked = thread::spawn(move || {
        let _intake = links.get(1).unwrap().reader.lock().unwrap();
        panic!("as the test wants it");
    });
    panicked.join().unwrap_err();
    // No operation waits, so the reading thread finds the panic.
    await_that(|| !tcp.inbox.has_no_failures());
    let mut deadline = deadline(4, LONG);
    let transport = tcp.into_transport();
    let inbox = transport.inbox();
    let error = inbox.take(1, 1..2, &transport, &mut deadline).unwrap_err();
    assert_eq!(error.ranks(), [0], "{error}");
    let text = error.to_string();
    assert!(
        text.contains("a thread that reads its connections panicked"),
        "{text}"
    );
}

/// The end of the program then cuts off nothing that the peer may not have read.
#[test]
fn last_words_have_left_when_a_rank_has_said_them() {
    let (tcp, mut other) = pair();
    narrow(&tcp, &other);
    let link = tcp.links.get(1).unwrap();
    fill(link);
    let (sender, told) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        other.read_to_end(&mut bytes).unwrap();
        sender.send(bytes).unwrap();
    });
    tcp.leave(&FinalMessage::Goodbye(LeaveKind::Closed));
    assert!(!link.has_unsent());
    let bytes = told.recv_timeout(Duration::from_secs(50)).unwrap();
    let last = Head::decode(bytes.last_chunk().unwrap()).unwrap();
    assert_eq!(last.kind, FrameKind::Goodbye);
}

/// A peer that has failed still collects final messages, and takes a connection that ends without one for a death.
#[test]
fn a_failed_peer_gets_the_final_message_though_another_thread_writes() {
    let (tcp, mut other) = pair();
    narrow(&tcp, &other);
    let link = tcp.links.get(1).unwrap();
    let error = Error::misuse("it failed".to_owned());
    let preamble = Abort {
        group: GroupId::WORLD,
        sequence: 0,
        error,
    }
    .encode();
    let head = Head::new(FrameKind::Abort, 0, 0, &preamble, &[]).encode();
    other.write_all(&[&head[..], &preamble].concat()).unwrap();
    await_that(|| !tcp.inbox.is_present(1));
    fill(link);
    let (holds, held) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let written = link.write(&head, &[], &[], |_| {
                holds.send(()).unwrap();
                released.recv().unwrap();
                thread::sleep(Duration::from_millis(50));
                false
            });
            written.unwrap_err();
        });
        held.recv().unwrap();
        let reader = scope.spawn(move || {
            let mut bytes = Vec::new();
            other.read_to_end(&mut bytes).unwrap();
            bytes
        });
        await_that(|| await_ready(link.stream(), PollFlags::OUT, Duration::ZERO));
        release.send(()).unwrap();
        tcp.leave(&FinalMessage::Goodbye(LeaveKind::Closed));
        let bytes = reader.join().unwrap();
        let last = Head::decode(bytes.last_chunk().unwrap());
        assert_eq!(last.map(|head| head.kind).ok(), Some(FrameKind::Goodbye));
    });
}

/// Makes the buffers of a connection small.
fn narrow(tcp: &Tcp, other: &TcpStream) {
    for stream in [tcp.links.get(1).unwrap().stream(), other] {
        set_socket_send_buffer_size(stream, 16 * 1024).unwrap();
        set_socket_recv_buffer_size(stream, 16 * 1024).unwrap();
    }
}

/// Writes until the buffers are full.
fn fill(link: &Link) {
    let mut stream = link.stream();
    while await_ready(stream, PollFlags::OUT, Duration::from_millis(300)) {
        while stream.write(&[0; 4096]).is_ok() {}
    }
}

fn part(index: u32, payload: &[u8]) -> OutgoingChunk<'_> {
    OutgoingChunk {
        tag: Tag {
            group: GroupId::WORLD,
            sequence: 4,
            phase: OpPhase::Reduce,
            index,
        },
        fingerprint: None,
        payload,
    }
}

fn await_that(mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < until, "it does not come");
        thread::yield_now();
    }
}

const LONG: Duration = Duration::from_secs(30);
