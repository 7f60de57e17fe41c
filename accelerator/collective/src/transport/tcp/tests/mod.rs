//! Peers that die, lie or fall silent. The test plays the odd rank with bare connections.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Barrier, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::{Tcp, mesh};
use crate::element::{Element, ReduceOp};
use crate::error::Error;
use crate::fingerprint::{CallSite, CollectiveFingerprint, OpKind};
use crate::group::{GroupOptions, ProcessGroup};
use crate::launch::Launch;
use crate::rendezvous::tests::registration;
use crate::rendezvous::{Key, Meeting, Rendezvous, StoreHost, StoreServer, WeakStoreClient};
use crate::topology::{Topology, TransportKind};
use crate::transport::Abort;
use crate::wire::message::Registration;
use crate::wire::{FrameKind, Head};

mod connecting;
mod handoff;
mod silence;
mod waiting;

/// Runs `honest` on all ranks but the last, and `odd` with that one's connections once all groups are connected.
/// Returns the results of the honest ranks in rank order, and fails after a minute.
fn run<R: Send + 'static>(
    world_size: usize,
    options: &GroupOptions,
    honest: impl Fn(ProcessGroup) -> R + Clone + Send + 'static,
    odd: impl FnOnce(Vec<TcpStream>) + Send + 'static,
) -> Vec<R> {
    run_with_witness(world_size, options, honest, |streams, _| odd(streams))
}

/// Like [`run`], but the odd rank can make the store report its exit.
fn run_with_witness<R: Send + 'static>(
    world_size: usize,
    options: &GroupOptions,
    honest: impl Fn(ProcessGroup) -> R + Clone + Send + 'static,
    odd: impl FnOnce(Vec<TcpStream>, &StoreServer) + Send + 'static,
) -> Vec<R> {
    let store = Arc::new(StoreServer::bind(("127.0.0.1", 0), world_size, None).unwrap());
    let rendezvous =
        Rendezvous::new("127.0.0.1", store.local_addr().port()).with_store(StoreHost::Launcher);
    let (sender, results) = mpsc::channel();
    let gate = Arc::new(Barrier::new(world_size));
    for rank in 0..world_size - 1 {
        let topology = Topology::new(rank, world_size).unwrap();
        let launch = Launch::new(topology, rendezvous.clone());
        let (honest, options, sender) = (honest.clone(), options.clone(), sender.clone());
        let gate = Arc::clone(&gate);
        thread::spawn(move || {
            let group = ProcessGroup::connect(&launch, &options).unwrap();
            gate.wait();
            // The receiver is gone only if the test has failed already.
            let _ = sender.send((rank, honest(group)));
        });
    }
    let witness = Arc::clone(&store);
    thread::spawn(move || {
        let timeout = Duration::from_secs(30);
        let rank = world_size - 1;
        let topology = Topology::new(rank, world_size).unwrap();
        let meeting = rendezvous.meet(
            &topology,
            timeout,
            timeout,
            TransportKind::Tcp,
            &WeakStoreClient::default(),
        );
        let meeting = meeting.unwrap();
        let streams = mesh::connect(rank, &meeting, Instant::now() + timeout).unwrap();
        gate.wait();
        odd(streams.into_iter().flatten().collect(), &witness);
    });
    let mut all: Vec<(usize, R)> = (0..world_size - 1)
        .map(|_| results.recv_timeout(Duration::from_secs(60)).unwrap())
        .collect();
    all.sort_by_key(|(rank, _)| *rank);
    all.into_iter().map(|(_, result)| result).collect()
}

/// The numbers of ranks of which connections are tried one by one, and found by epoll.
const FEW_AND_MANY: [usize; 2] = [3, 10];

fn reduce(len: usize) -> impl Fn(ProcessGroup) -> Error + Clone + Send {
    move |group| {
        let mut values = vec![1.0_f32; len];
        let error = group.all_reduce(&mut values, ReduceOp::Sum).unwrap_err();
        let later = group.barrier().unwrap_err();
        assert_eq!(later.to_string(), error.to_string());
        error
    }
}

fn long_timeouts() -> GroupOptions {
    GroupOptions::new()
        .with_progress_timeout(Duration::from_secs(50))
        .with_transport(TransportKind::Tcp)
}

/// Returns options with a liveness timeout of a second.
fn short_liveness_timeout() -> GroupOptions {
    long_timeouts().with_liveness_timeout(Duration::from_secs(1))
}

fn show_life(streams: &mut [TcpStream]) {
    let head = Head::new(FrameKind::Heartbeat, 0, 1000, &[], &[]);
    for stream in streams {
        stream.write_all(&head.encode()).unwrap();
    }
}

/// Reads frames until `count` operations have begun, and returns the headers and their bodies.
fn read_headers(stream: &mut TcpStream, count: u64) -> Vec<(Head, Vec<u8>)> {
    let mut frames = Vec::new();
    while (frames.len() as u64) < count {
        let head = Head::read(stream).unwrap();
        let mut body = vec![0; head.preamble + head.payload];
        stream.read_exact(&mut body).unwrap();
        if head.kind == FrameKind::Header {
            assert_eq!(head.sequence, frames.len() as u64);
            frames.push((head, body));
        }
    }
    frames
}

/// Reads frames until an abort, which it returns.
fn final_message(stream: &mut TcpStream) -> Abort {
    loop {
        let head = Head::read(stream).unwrap();
        let mut preamble = vec![0; head.preamble];
        stream.read_exact(&mut preamble).unwrap();
        let mut payload = vec![0; head.payload];
        stream.read_exact(&mut payload).unwrap();
        if head.kind == FrameKind::Abort {
            return Abort::decode(&head, &preamble).unwrap();
        }
    }
}

/// Connects rank 0 of two, whose heartbeats the test drives, and returns the bare connection of rank 1 too.
fn pair() -> (Tcp, TcpStream) {
    let mut meetings = meetings(1, 2);
    let (second, first) = (meetings.pop().unwrap(), meetings.pop().unwrap());
    let timeout = Duration::from_secs(40);
    let other = thread::spawn(move || {
        let mut streams = mesh::connect(1, &second, Instant::now() + timeout).unwrap();
        streams.remove(0).unwrap()
    });
    let tcp = Tcp::connect(&Topology::new(0, 2).unwrap(), first, timeout).unwrap();
    (tcp, other.join().unwrap())
}

/// Returns the meetings of ranks that have met.
fn meetings(job: u8, world_size: usize) -> Vec<Meeting> {
    let listen = |_| TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let listeners: Vec<TcpListener> = (0..world_size).map(listen).collect();
    let register = |(rank, listener): (usize, &TcpListener)| Registration {
        address: listener.local_addr().unwrap(),
        ..registration(rank, world_size)
    };
    let ranks: Vec<_> = listeners.iter().enumerate().map(register).collect();
    let meeting = |listener| Meeting {
        ranks: ranks.clone(),
        listener,
        key: Key::of_job(&[job; 32], None),
        store: None,
    };
    listeners.into_iter().map(meeting).collect()
}

fn assert_lost(errors: &[Error], rank: usize) {
    let process = format!("rank {rank} (process {} on ", std::process::id());
    for error in errors {
        assert!(error.is_peer_lost() && !error.is_peer_left(), "{error}");
        assert_eq!(error.ranks(), [rank], "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&process), "{text}");
        assert!(text.contains("collective #0, all_reduce sum f32"), "{text}");
        assert!(text.contains("tests/mod.rs:"), "{text}");
    }
}

#[test]
fn a_death_before_the_operation_is_named_by_all() {
    for ranks in FEW_AND_MANY {
        let errors = run(ranks, &long_timeouts(), reduce(10), drop);
        assert_lost(&errors, ranks - 1);
    }
}

#[test]
fn a_death_in_the_operation_is_named_by_all() {
    for ranks in FEW_AND_MANY {
        let errors = run(ranks, &long_timeouts(), reduce(3_000_000), |mut streams| {
            // The odd rank reads a part of the data, sends nothing, and dies.
            for stream in &mut streams {
                stream.read_exact(&mut [0; 1000]).unwrap();
            }
        });
        assert_lost(&errors, ranks - 1);
    }
}

#[test]
fn a_death_within_a_frame_is_named() {
    for ranks in FEW_AND_MANY {
        let errors = run(ranks, &long_timeouts(), reduce(10), |mut streams| {
            let head = Head::new(FrameKind::Header, 0, 0, &[0; 20], &[0; 40]).encode();
            for stream in &mut streams {
                stream.write_all(&head[..20]).unwrap();
            }
        });
        assert_lost(&errors, ranks - 1);
    }
}

#[test]
fn a_death_is_named_though_a_living_rank_is_late() {
    let options = long_timeouts();
    let errors = run(
        3,
        &options,
        |group| {
            if group.rank() == 1 {
                thread::sleep(Duration::from_secs(1));
            }
            let started = Instant::now();
            let error = reduce(10)(group);
            // The time is far below the progress timeout.
            assert!(started.elapsed() < Duration::from_secs(30));
            error
        },
        drop,
    );
    assert_lost(&errors, 2);
}

#[test]
fn a_survivor_that_is_late_is_not_lost() {
    let (done, wait) = mpsc::channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    let lost = run(
        3,
        &long_timeouts(),
        move |group| {
            if group.rank() == 1 {
                let _ = wait.lock().unwrap().recv();
                return group.lost();
            }
            assert!(group.barrier().unwrap_err().is_peer_lost());
            // By then, this rank has stopped reading from the other one.
            thread::sleep(Duration::from_secs(3));
            let lost = group.lost();
            let _ = done.send(());
            lost
        },
        drop,
    );
    assert_eq!(lost, [[2], [2]]);
}

#[test]
fn a_rank_that_was_silent_when_another_died_is_lost() {
    // A live rank sends a heartbeat every quarter of it, which a busy machine may delay by as much again.
    let options = long_timeouts().with_liveness_timeout(Duration::from_secs(10));
    let (keep, kept) = mpsc::channel();
    let lost = run(
        4,
        &options,
        |group| {
            if group.rank() == 2 {
                // The delay exceeds half the timeout, and is too short for a judgement.
                thread::sleep(Duration::from_secs(6));
                group.abort("its host is gone");
            }
            assert!(group.barrier().unwrap_err().is_peer_lost());
            (group.lost(), group)
        },
        move |mut streams| {
            show_life(&mut streams);
            // The connections stay open.
            let _ = keep.send(streams);
        },
    );
    for (lost, group) in &lost {
        assert_eq!(*lost, [2, 3], "rank {}", group.rank());
    }
    drop(kept);
}

#[test]
fn a_death_ends_started_operations() {
    let errors = run(
        3,
        &long_timeouts(),
        |group| {
            let start = || group.start_all_reduce(group.buffer(f32::DTYPE, 100), ReduceOp::Sum);
            let first = start().unwrap();
            let second = start();
            let error = first.wait().unwrap_err();
            if let Ok(second) = second {
                assert!(second.wait().unwrap_err().is_peer_lost());
            }
            error
        },
        drop,
    );
    assert_lost(&errors, 2);
}

#[test]
fn a_rank_that_takes_nothing_is_named_in_time() {
    let options = long_timeouts().with_progress_timeout(Duration::from_secs(1));
    let (release, held) = mpsc::channel::<()>();
    // The data exceeds what the sockets hold, so the sender stalls.
    let errors = run(
        2,
        &options,
        |group| group.broadcast(&mut vec![0_u8; 60_000_000], 0).unwrap_err(),
        move |streams| {
            let mut declared = streams[0].try_clone().unwrap();
            let fingerprint =
                CollectiveFingerprint::new(OpKind::Broadcast, CallSite::new("odd.rs", 1))
                    .with_data(u8::DTYPE, 60_000_000)
                    .with_root(0);
            let (bytes, len) = fingerprint.encode();
            let head = Head::new(FrameKind::Header, 0, 0, &bytes[..len], &[]);
            declared.write_all(&head.encode()).unwrap();
            declared.write_all(&bytes[..len]).unwrap();
            // The rank waits for the end of the test.
            let _ = held.recv();
        },
    );
    drop(release);
    assert!(errors[0].is_timeout(), "{}", errors[0]);
    assert_eq!(errors[0].ranks(), [1], "{}", errors[0]);
}

#[test]
fn bytes_that_are_no_frame_are_told() {
    let garbage: [(&[u8], &str); 4] = [
        (&[b'x'; 100], "bytes that begin no frame"),
        (
            &Head::new(FrameKind::Header, 0, 0, &[], &[]).encode(),
            "a malformed fingerprint",
        ),
        (
            &{
                let mut head = Head::new(FrameKind::Gather, 0, 0, &[], &[]).encode();
                head[27] = 0xff;
                head
            },
            "a wrong checksum",
        ),
        (
            &Head::new(FrameKind::Gather, 5, 3, &[], &[]).encode(),
            "expected Tag",
        ),
    ];
    let cases = garbage
        .iter()
        .flat_map(|case| FEW_AND_MANY.map(|ranks| (case, ranks)));
    for ((bytes, text), ranks) in cases {
        let bytes = bytes.to_vec();
        let (release, held) = mpsc::channel::<()>();
        let errors = run(ranks, &long_timeouts(), reduce(10), move |mut streams| {
            for stream in &mut streams {
                stream.write_all(&bytes).unwrap();
            }
            let _ = held.recv();
        });
        drop(release);
        for error in errors {
            assert!(error.is_protocol(), "{error}");
            assert_eq!(error.ranks(), [ranks - 1], "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

/// The odd rank answers nothing before it knows of all three operations, and then answers the last one first.
#[test]
fn started_operations_are_under_way_together() {
    let sums = run(
        2,
        &long_timeouts(),
        |group| {
            let pending: Vec<_> = (0..3)
                .map(|index| {
                    let mut buffer = group.buffer(f32::DTYPE, 4);
                    buffer.as_mut_slice().unwrap().fill(index as f32);
                    group.start_all_reduce(buffer, ReduceOp::Sum).unwrap()
                })
                .collect();
            let sums = pending.into_iter().map(|pending| {
                let buffer = pending.wait().unwrap();
                buffer.as_slice::<f32>().unwrap()[3]
            });
            sums.collect::<Vec<f32>>()
        },
        |mut streams| {
            let frames = read_headers(&mut streams[0], 3);
            for (head, body) in frames.into_iter().rev() {
                streams[0].write_all(&head.encode()).unwrap();
                streams[0].write_all(&body).unwrap();
            }
            // The rank waits until the other one leaves.
            let _ = streams[0].read_to_end(&mut Vec::new());
        },
    );
    assert_eq!(sums, [[0.0, 2.0, 4.0]]);
}

/// An error ends the running operations in order. An operation that is done before it stays done.
#[test]
fn what_comes_before_an_error_is_done() {
    let outcomes = run(
        2,
        &long_timeouts(),
        |group| {
            let start = |_| {
                let buffer = group.buffer(f32::DTYPE, 4);
                group.start_all_reduce(buffer, ReduceOp::Sum).unwrap()
            };
            let pending: Vec<_> = (0..4).map(start).collect();
            let outcomes = pending.into_iter().map(|pending| pending.wait().map(drop));
            outcomes.collect::<Vec<_>>()
        },
        |mut streams| {
            let frames = read_headers(&mut streams[0], 3);
            // The second operation is never answered. The third answer is wrong, which the rank notices at once.
            let mut wrong = frames[2].0;
            wrong.payload = 0;
            wrong.checksum =
                Head::new(wrong.kind, 2, 0, &frames[2].1[..wrong.preamble], &[]).checksum;
            streams[0].write_all(&wrong.encode()).unwrap();
            streams[0]
                .write_all(&frames[2].1[..wrong.preamble])
                .unwrap();
            streams[0].write_all(&frames[0].0.encode()).unwrap();
            streams[0].write_all(&frames[0].1).unwrap();
        },
    );
    let [first, second, third, fourth] = &outcomes[0][..] else {
        panic!("{outcomes:?}");
    };
    assert!(first.is_ok(), "{first:?}");
    let error = second.as_ref().unwrap_err();
    assert!(error.is_peer_lost(), "{error}");
    assert!(error.to_string().contains("collective #1"), "{error}");
    for later in [third, fourth] {
        assert_eq!(later.as_ref().unwrap_err().to_string(), error.to_string());
    }
}
