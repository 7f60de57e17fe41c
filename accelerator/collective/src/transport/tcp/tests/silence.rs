//! Silent peers, and the ranks that judge them.

use std::{
    io::Write,
    net::TcpStream,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{
    Tcp, final_message, long_timeouts, meetings, mesh, pair, reduce, run, run_with_witness,
    short_liveness_timeout, show_life,
};
use crate::element::{Element, ReduceOp};
use crate::error::Result;
use crate::fingerprint::{CallSite, CollectiveFingerprint, OpKind};
use crate::group::ProcessGroup;
use crate::liveness::suspect_after;
use crate::shm::{Arena, HeartbeatWords, Room, ShmPeers, Spin};
use crate::socket::await_ready;
use crate::topology::Topology;
use crate::transport::tests::deadline;
use crate::transport::{CHUNK, ControlPlane, DataPlane, OpPhase, OutgoingChunk, Tag};
use crate::wire::{FrameKind, GroupId, Head, Heartbeat};

/// The odd rank shows life once and then is silent. Every operation reports it in time, and names no live rank.
#[test]
fn silence_is_named_in_every_operation() {
    type RankBody = fn(&ProcessGroup) -> Result<()>;
    let operations: [RankBody; 8] = [
        |group| group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum),
        |group| group.all_reduce(&mut vec![1.0_f32; 3_000_000], ReduceOp::Sum),
        |group| group.broadcast(&mut vec![1_u8; 9_000_000], 0),
        |group| group.all_gather(&[1_u8; 10]).map(drop),
        |group| {
            group
                .reduce_scatter(&[1.0_f32; 10], ReduceOp::Sum)
                .map(drop)
        },
        |group| group.gather_object(&1, 0).map(drop),
        |group| {
            let buffer = group.buffer(f32::DTYPE, 10);
            group
                .start_all_reduce(buffer, ReduceOp::Sum)?
                .wait()
                .map(drop)
        },
        |group| group.barrier(),
    ];
    thread::scope(|scope| {
        for operation in operations {
            scope.spawn(move || {
                let (release, held) = mpsc::channel::<()>();
                let honest = move |group: ProcessGroup| {
                    let started = Instant::now();
                    let error = operation(&group).unwrap_err();
                    (error, started.elapsed())
                };
                let told = run(3, &short_liveness_timeout(), honest, move |mut streams| {
                    show_life(&mut streams);
                    let _ = held.recv();
                });
                drop(release);
                for (error, waited) in told {
                    assert!(error.is_peer_lost() && !error.is_peer_left(), "{error}");
                    assert_eq!(error.ranks(), [2], "{error}");
                    let culprit = error.culprit().unwrap();
                    assert_eq!(culprit.pid(), Some(std::process::id()));
                    assert!(
                        culprit.cause().starts_with("it has been silent for 1."),
                        "{error}"
                    );
                    assert!(
                        error.to_string().contains("was in collective #0"),
                        "{error}"
                    );
                    assert!(waited < Duration::from_secs(6), "{waited:?}");
                }
            });
        }
    });
}

/// The silence is noticed while no operation runs, so the next call need not wait for it.
#[test]
fn silence_between_operations_is_noted() {
    let (release, held) = mpsc::channel::<()>();
    let honest = |group: ProcessGroup| {
        let until = Instant::now() + Duration::from_secs(30);
        let inbox = group.inbox();
        while inbox.is_present(1) {
            assert!(Instant::now() < until, "nobody noticed");
            thread::sleep(Duration::from_millis(10));
        }
        let called = Instant::now();
        let error = group.barrier().unwrap_err();
        // A whole timeout has passed before.
        assert!(called.elapsed() < Duration::from_secs(1), "{error}");
        error
    };
    let errors = run(2, &short_liveness_timeout(), honest, move |mut streams| {
        show_life(&mut streams);
        let _ = held.recv();
    });
    drop(release);
    assert!(
        errors[0].to_string().contains("it has been silent"),
        "{}",
        errors[0]
    );
}

/// A rank that is given up gets the reason, and can read it when it runs again.
#[test]
fn a_rank_that_is_given_up_is_told() {
    let (sender, words) = mpsc::channel();
    run(
        3,
        &short_liveness_timeout(),
        reduce(10),
        move |mut streams| {
            show_life(&mut streams);
            for stream in &mut streams {
                let _ = sender.send(final_message(stream));
            }
        },
    );
    for abort in words.iter().take(2) {
        let culprit = abort.error.culprit().unwrap();
        assert_eq!(culprit.rank(), 2);
        assert!(
            culprit.cause().starts_with("it has been silent"),
            "{}",
            culprit.cause()
        );
        assert!(abort.error.is_peer_lost());
    }
}

/// A rank that computes for long while another one sends it more than it holds does not read in the meantime, not even
/// heartbeats.
#[test]
fn a_full_queue_is_no_silence() {
    const LEN: usize = 40_000_000;
    let honest = |group: ProcessGroup| {
        // The delay is far beyond the liveness timeout.
        thread::sleep(Duration::from_secs(3));
        let mut values = vec![0_u8; LEN];
        group.broadcast(&mut values, 1).unwrap();
        values.iter().all(|x| *x == 7)
    };
    let whole = run(2, &short_liveness_timeout(), honest, |mut streams| {
        show_life(&mut streams);
        let fingerprint = CollectiveFingerprint::new(OpKind::Broadcast, CallSite::new("odd.rs", 1))
            .with_data(u8::DTYPE, LEN)
            .with_root(1);
        let (bytes, len) = fingerprint.encode();
        let values = vec![7_u8; CHUNK];
        for index in 0..LEN.div_ceil(CHUNK) {
            let payload = &values[..CHUNK.min(LEN - index * CHUNK)];
            let (kind, preamble) = match index {
                0 => (FrameKind::Header, &bytes[..len]),
                _ => (FrameKind::Gather, &[][..]),
            };
            let head = Head::new(kind, 0, index as u32, preamble, payload);
            for piece in [&head.encode()[..], preamble, payload] {
                streams[0].write_all(piece).unwrap();
            }
        }
        // The connection stays until the other side has read everything.
        let _ = final_message(&mut streams[0]);
    });
    assert_eq!(whole, [true]);
}

/// A rank that did not run for a while blames no rank for the silence that it slept through.
#[test]
fn who_was_stopped_blames_nobody() {
    let liveness = Duration::from_millis(800);
    let (tcp, _other) = heard_pair();
    let until = Instant::now() + Duration::from_secs(30);
    let mut due = Instant::now();
    tcp.heartbeat_round(Instant::now(), &mut due, liveness);
    // A stopped process sleeps like this.
    thread::sleep(3 * liveness);
    let woke = Instant::now();
    let mut pause = tcp.heartbeat_round(Instant::now(), &mut due, liveness);
    assert!(tcp.inbox.is_present(1), "it was asleep itself");
    while tcp.inbox.is_present(1) {
        assert!(Instant::now() < until, "silence is never noticed");
        thread::sleep(pause);
        pause = tcp.heartbeat_round(Instant::now(), &mut due, liveness);
    }
    // The clocks count whole milliseconds.
    let least = liveness - Duration::from_millis(5);
    assert!(woke.elapsed() >= least, "{:?}", woke.elapsed());
}

/// The heartbeats have a thread of its own, which may not run between the first connection and the stop.
#[test]
fn who_was_stopped_before_its_first_round_blames_nobody() {
    let liveness = Duration::from_millis(800);
    let (tcp, _other) = heard_pair();
    thread::sleep(3 * liveness);
    assert!(tcp.silent(suspect_after(liveness)).is_empty());
    tcp.heartbeat(liveness);
    assert!(tcp.inbox.is_present(1), "it was asleep itself");
}

#[test]
fn who_was_stopped_within_a_round_blames_nobody() {
    let liveness = Duration::from_millis(800);
    let (tcp, _other) = heard_pair();
    let began = Instant::now();
    thread::sleep(3 * liveness);
    let pause = tcp.heartbeat_round(began, &mut tcp.round_due.lock(), liveness);
    thread::sleep(pause);
    tcp.heartbeat(liveness);
    assert!(tcp.inbox.is_present(1), "it was asleep itself");
}

/// A [`pair`], after the first rank has heard the second one.
fn heard_pair() -> (Tcp, TcpStream) {
    let (tcp, mut other) = pair();
    show_life(std::slice::from_mut(&mut other));
    let until = Instant::now() + Duration::from_secs(30);
    while !tcp.links.get(1).unwrap().liveness.has_sent_heartbeat() {
        assert!(Instant::now() < until, "no heartbeat arrived");
        thread::sleep(Duration::from_millis(1));
    }
    (tcp, other)
}

/// A peer that is still negotiating the data path gets the connect timeout in addition.
#[test]
fn a_peer_without_a_heartbeat_gets_the_connect_timeout_too() {
    let liveness = Duration::from_millis(200);
    let (tcp, mut other) = pair();
    let connected = Instant::now();
    // Any frame other than a heartbeat.
    let goodbye_of_a_group = Head::new(FrameKind::Goodbye, 0, 0, &[], &[]).in_group(GroupId(1));
    other.write_all(&goodbye_of_a_group.encode()).unwrap();
    while connected.elapsed() < 4 * liveness {
        thread::sleep(tcp.heartbeat(liveness).unwrap().min(liveness / 4));
        assert!(tcp.inbox.is_present(1));
    }
    assert!(
        !is_ready(&other),
        "a frame was sent before heartbeats were enabled"
    );

    tcp.enable_heartbeats(None);
    tcp.heartbeat(liveness);
    assert_eq!(Head::read(&mut other).unwrap().kind, FrameKind::Heartbeat);
    show_life(std::slice::from_mut(&mut other));
    await_loss(&tcp, 1, liveness);
}

/// A peer that is never idle would not need a heartbeat, but its liveness timeout counts from the first one.
#[test]
fn a_link_in_constant_use_carries_the_first_heartbeat() {
    let (tcp, mut other) = pair();
    // Fails rather than hangs if there is no heartbeat.
    other.set_nonblocking(false).unwrap();
    other
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    tcp.enable_heartbeats(None);
    let frame = Head::new(FrameKind::Goodbye, 0, 0, &[], &[]).in_group(GroupId(1));
    let link = tcp.links.get(1).unwrap();
    for has_heartbeat in [true, false] {
        link.write(&frame.encode(), &[], &[], |_| true).unwrap();
        assert_eq!(Head::read(&mut other).unwrap().kind, FrameKind::Goodbye);
        tcp.heartbeat(Duration::from_secs(5));
        match has_heartbeat {
            true => assert_eq!(Head::read(&mut other).unwrap().kind, FrameKind::Heartbeat),
            false => assert!(!is_ready(&other), "a second heartbeat was sent"),
        }
    }
}

/// Rank 1 shares memory with rank 2, and not with rank 0.
#[test]
fn ranks_that_share_memory_exchange_heartbeats_there() {
    let liveness = Duration::from_millis(400);
    let (tcp, mut remote, local) = middle_of_three();
    let arenas: Arc<[Arc<Arena>]> = (0..2)
        .map(|_| Arc::new(Arena::of_thread(Room::World(2)).unwrap()))
        .collect();
    let spin = Spin::for_ranks(2, 2);
    tcp.enable_heartbeats(Some(&ShmPeers::new(0, Arc::clone(&arenas), 1, spin)));
    let started = Instant::now();
    while started.elapsed() < 3 * liveness {
        show_life(std::slice::from_mut(&mut remote));
        arenas[1].heartbeat().publish(HeartbeatWords {
            content: Heartbeat {
                awaited: Some(1),
                active: Some(Duration::ZERO),
            }
            .encode(),
            timeout_ms: 400,
        });
        thread::sleep(tcp.heartbeat(liveness).unwrap());
        assert!(tcp.inbox.is_present(0) && tcp.inbox.is_present(2));
    }
    assert!(tcp.last_activity(2).is_some_and(|at| at > started));
    assert!(arenas[0].heartbeat().read_new(&mut 0).is_some());
    assert!(!is_ready(&local), "rank 2 got a frame");
    let head = Head::read(&mut remote).unwrap();
    assert_eq!(head.kind, FrameKind::Heartbeat);
    await_loss(&tcp, 2, liveness);
}

/// Returns rank 1 of three connected ranks, and the connections of ranks 0 and 2 to it.
fn middle_of_three() -> (Tcp, TcpStream, TcpStream) {
    let timeout = Duration::from_secs(40);
    let mut others = Vec::new();
    let mut own = None;
    for (rank, meeting) in meetings(1, 3).into_iter().enumerate() {
        if rank == 1 {
            own = Some(meeting);
            continue;
        }
        others.push(thread::spawn(move || {
            let mut streams = mesh::connect(rank, &meeting, Instant::now() + timeout).unwrap();
            streams.remove(1).unwrap()
        }));
    }
    let tcp = Tcp::connect(&Topology::new(1, 3).unwrap(), own.unwrap(), timeout).unwrap();
    let [remote, local] = <[_; 2]>::try_from(others).unwrap();
    (tcp, remote.join().unwrap(), local.join().unwrap())
}

/// Runs heartbeat rounds until the rank, which stays silent, is reported lost.
fn await_loss(tcp: &Tcp, rank: usize, liveness: Duration) {
    let until = Instant::now() + Duration::from_secs(30);
    while tcp.inbox.is_present(rank) {
        assert!(Instant::now() < until, "silence is never noticed");
        thread::sleep(tcp.heartbeat(liveness).unwrap());
    }
}

fn is_ready(stream: &TcpStream) -> bool {
    await_ready(stream, PollFlags::IN, Duration::ZERO)
}

/// Connections that end after this process did not run are the others' answer to its silence.
#[test]
fn who_was_stopped_and_given_up_knows_it() {
    let liveness = Duration::from_millis(100);
    let (tcp, other) = pair();
    let now = Instant::now();
    tcp.heartbeat_round(now, &mut { now }, liveness);
    thread::sleep(5 * liveness);
    drop(other);
    let mut deadline = deadline(4, Duration::from_secs(50));
    let transport = tcp.into_transport();
    let inbox = transport.inbox();
    let error = inbox.take(1, 1..2, &transport, &mut deadline).unwrap_err();
    assert_eq!(error.ranks(), [0], "{error}");
    let text = error.to_string();
    assert!(text.contains("it did not run for "), "{text}");
    assert!(
        text.contains("rank 1 gave it up (its connection ended"),
        "{text}"
    );
}

/// The ranks that wait for this one then blame the peer that reads nothing.
#[test]
fn who_cannot_send_says_whom_it_waits_for() {
    let (tcp, other) = pair();
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut deadline = deadline(4, Duration::from_secs(50));
            let part = OutgoingChunk {
                tag: Tag {
                    group: GroupId::WORLD,
                    sequence: 4,
                    phase: OpPhase::Reduce,
                    index: 0,
                },
                fingerprint: None,
                payload: &vec![0; CHUNK],
            };
            loop {
                if let Err(error) = tcp.send(1, part, &mut deadline, None) {
                    return error;
                }
            }
        });
        let until = Instant::now() + Duration::from_secs(30);
        while tcp.inbox.awaited() != Some(1) {
            assert!(Instant::now() < until, "it does not say");
            thread::yield_now();
        }
        drop(other);
        assert_eq!(sender.join().unwrap().ranks(), [1]);
    });
    assert_eq!(tcp.inbox.awaited(), None);
}

/// An event on another thread wakes an operation that sleeps on its connections.
#[test]
fn an_event_wakes_an_operation_that_waits_for_a_part() {
    let (tcp, _other) = pair();
    let version = tcp.inbox.version();
    thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let until = Instant::now() + Duration::from_secs(30);
            tcp.poll_until_event(&tcp.poller, version, until);
            Instant::now() < until
        });
        while tcp.handoff.nap().is_none() {
            thread::yield_now();
        }
        // This usually suffices for it to fall asleep, and it must wake in any case.
        thread::sleep(Duration::from_millis(50));
        tcp.inbox.wake();
        assert!(waits.join().unwrap(), "it slept on");
    });
}

#[test]
fn a_witness_says_how_a_rank_died() {
    let errors = run_with_witness(3, &long_timeouts(), reduce(10), |streams, store| {
        store.report_exit(2, "it was killed by SIGKILL");
        drop(streams);
    });
    for error in errors {
        let cause = error.culprit().unwrap().cause();
        // The wording differs if the store does not know yet that all are connected.
        assert!(cause.contains("was killed by SIGKILL"), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(&format!(" is lost: {cause}; rank ")),
            "{text}"
        );
        assert!(text.contains("was in collective #0"), "{text}");
    }
}

/// The connections stay up, as when a whole host is gone.
#[test]
fn a_witness_is_believed_though_the_connections_stand() {
    let (release, held) = mpsc::channel::<()>();
    let options = long_timeouts().with_liveness_timeout(Duration::from_secs(50));
    let errors = run_with_witness(3, &options, reduce(10), move |mut streams, store| {
        show_life(&mut streams);
        store.report_exit(2, "it was killed by SIGKILL");
        let _ = held.recv();
    });
    drop(release);
    for error in errors {
        assert_eq!(error.ranks(), [2], "{error}");
        let cause = error.culprit().unwrap().cause();
        // The wording differs if the store does not know yet that all are connected.
        assert!(cause.contains("was killed by SIGKILL"), "{error}");
    }
}
