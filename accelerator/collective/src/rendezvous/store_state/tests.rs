use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::{rendezvous::tests::registration, topology::TransportKind, wire::message::LocalPlace};

const LIVENESS: Duration = Duration::from_secs(2);
const MS: Duration = Duration::from_millis(1);

fn come(connection: Connection, rank: usize, world_size: usize) -> StoreInput {
    StoreInput::Registered {
        connection,
        registration: registration(rank, world_size),
    }
}

/// Returns the registration of a process outside the job that claims to be one of its ranks.
fn other_process(connection: Connection, rank: usize, world_size: usize) -> StoreInput {
    StoreInput::Registered {
        connection,
        registration: Registration {
            pid: 900,
            ..registration(rank, world_size)
        },
    }
}

fn say(rank: usize, message: RankMessage) -> StoreInput {
    StoreInput::Message { rank, message }
}

fn exit_notice(rank: usize, text: &str) -> StoreInput {
    StoreInput::ExitNotice {
        rank,
        text: text.to_owned(),
    }
}

/// Returns the refused connections with their errors.
fn refusals(actions: &[StoreAction]) -> Vec<(Connection, Error)> {
    let refusals = actions.iter().filter_map(|action| match action {
        StoreAction::Refuse { connection, error } => Some((*connection, error.clone())),
        StoreAction::Welcome { .. } => panic!("unexpected {action:?}"),
        _ => None,
    });
    refusals.collect()
}

/// Asserts that these connections are refused with the same text, and returns the error.
fn refusal(actions: &[StoreAction], expected: &[Connection]) -> Error {
    let refusals = refusals(actions);
    let connections: Vec<Connection> = refusals.iter().map(|(x, _)| *x).collect();
    assert_eq!(connections, expected, "{actions:?}");
    let error = refusals[0].1.clone();
    assert!(
        refusals
            .iter()
            .all(|(_, x)| x.to_string() == error.to_string())
    );
    error
}

fn reports(actions: &[StoreAction]) -> Vec<(usize, Vec<usize>)> {
    let reports = actions.iter().filter_map(|action| match action {
        StoreAction::Report(Report::Failed(x)) => Some((x.rank, x.blamed.clone())),
        _ => None,
    });
    reports.collect()
}

fn exit_notices(actions: &[StoreAction]) -> Vec<(&[Connection], usize, &str, Severity)> {
    let exit_notices = actions.iter().filter_map(|action| match action {
        StoreAction::ReportExit {
            connections,
            rank,
            text,
            severity,
        } => Some((&connections[..], *rank, &text[..], *severity)),
        _ => None,
    });
    exit_notices.collect()
}

/// Returns a state whose ranks have met, on the connections 10, 11 and so on.
fn met(world_size: usize, now: Instant) -> StoreState {
    let mut state = StoreState::new(world_size);
    for rank in 0..world_size {
        state.step(come(10 + rank as Connection, rank, world_size), now);
    }
    assert!(matches!(state.phase, Phase::Connecting));
    state
}

#[test]
fn the_last_rank_completes_the_table() {
    let now = Instant::now();
    let mut state = StoreState::new(3);
    for (connection, rank) in [(10, 2), (11, 0)] {
        let actions = state.step(come(connection, rank, 3), now);
        assert!(
            matches!(&actions[..], [StoreAction::Report(Report::Joined { rank: joined, .. })] if *joined == rank)
        );
    }
    let actions = state.step(come(12, 1, 3), now);
    let [
        StoreAction::Report(Report::Joined { .. }),
        StoreAction::Report(Report::Met),
        StoreAction::Welcome { connections, ranks },
    ] = &actions[..]
    else {
        panic!("unexpected {actions:?}");
    };
    assert_eq!(connections, &[11, 12, 10]);
    assert!(ranks.iter().enumerate().all(|(i, x)| x.rank == i));
    for rank in 0..3 {
        assert!(state.due().is_some(), "somebody is not connected yet");
        assert!(
            state
                .step(say(rank, RankMessage::Connected), now)
                .is_empty()
        );
    }
    assert_eq!(state.due(), None);
    assert!(!state.was_suspended(Some(now), now + LIVENESS));
    // Nothing changes afterwards.
    let late = state.step(other_process(13, 1, 3), now);
    assert!(refusals(&late)[0].1.to_string().contains("too late"));
    assert!(!state.knows(13) && state.knows(10));
    assert!(
        state
            .step(StoreInput::Gone { connection: 10 }, now)
            .is_empty()
    );
    assert!(
        state
            .step(StoreInput::Tick, now + 100 * LIVENESS)
            .is_empty()
    );
}

#[test]
fn a_process_that_joins_again_is_told_that_it_is_in_already() {
    let now = Instant::now();
    let told = |error: &Error| {
        let text = error.to_string();
        assert!(
            text.contains("process 100 on here has joined this job already, as rank 0"),
            "{text}"
        );
        assert!(text.contains("clone it"), "{text}");
        assert!(!text.contains("old process"), "{text}");
    };
    // If others are still missing, this ends the meeting, since the two would share a place.
    let mut state = StoreState::new(2);
    state.step(come(10, 0, 2), now);
    told(&refusal(&state.step(come(11, 0, 2), now), &[11, 10]));
    // The answer is the same while the ranks are together and after they have left.
    let mut state = StoreState::new(2);
    state.step(come(10, 0, 2), now);
    state.step(come(11, 1, 2), now);
    for rank in [0, 1] {
        state.step(say(rank, RankMessage::Connected), now);
    }
    told(&refusal(&state.step(come(12, 0, 2), now), &[12]));
    for rank in [0, 1] {
        state.step(say(rank, RankMessage::Leave), now);
    }
    told(&refusal(&state.step(come(13, 0, 2), now), &[13]));
}

#[test]
fn ranks_that_are_asked_for_different_transports_are_told_at_once() {
    let now = Instant::now();
    let mut state = StoreState::new(4);
    let come = |connection, rank, transport| StoreInput::Registered {
        connection,
        registration: Registration {
            transport,
            ..registration(rank, 4)
        },
    };
    state.step(come(10, 3, TransportKind::Tcp), now);
    state.step(come(11, 0, TransportKind::Tcp), now);
    let error = refusal(
        &state.step(come(12, 1, TransportKind::Auto), now),
        &[12, 11, 10],
    );
    assert!(error.is_rendezvous(), "{error}");
    assert_eq!(error.ranks(), [0, 1]);
    let text = error.to_string();
    assert!(text.contains("rank 0 (process 100 on here) was asked to use the transport tcp, and "));
    assert!(
        text.contains("rank 1 (process 101 on here) auto; ACCEL_TRANSPORT"),
        "{text}"
    );
    // A rank that comes later gets the same error.
    let late = refusal(&state.step(come(13, 2, TransportKind::Tcp), now), &[13]);
    assert_eq!(late.to_string(), text);
}

#[test]
fn a_rank_that_went_away_decides_no_transport() {
    let now = Instant::now();
    let mut state = StoreState::new(2);
    let come = |connection, transport| StoreInput::Registered {
        connection,
        registration: Registration {
            transport,
            ..registration(0, 2)
        },
    };
    state.step(come(10, TransportKind::Tcp), now);
    state.step(StoreInput::Gone { connection: 10 }, now);
    assert!(refusals(&state.step(come(11, TransportKind::Auto), now)).is_empty());
}

#[test]
fn ranks_with_one_local_rank_on_a_host_are_told_when_all_have_come() {
    let now = Instant::now();
    let mut state = StoreState::new(2);
    let come = |connection, rank| StoreInput::Registered {
        connection,
        registration: Registration {
            local: Some(LocalPlace { rank: 0, size: 2 }),
            ..registration(rank, 2)
        },
    };
    assert!(refusals(&state.step(come(10, 1), now)).is_empty());
    let error = refusal(&state.step(come(11, 0), now), &[11, 10]);
    assert!(error.is_rendezvous(), "{error}");
    assert_eq!(error.ranks(), [0, 1]);
    let text = error.to_string();
    assert!(
        text.contains("ranks 0 and 1 have local rank 0 of 2"),
        "{text}"
    );
}

#[test]
fn the_deadline_names_the_missing_and_what_was_seen() {
    let now = Instant::now();
    let mut state = StoreState::new(3);
    state.step(come(1, 0, 3), now);
    state.step(come(2, 2, 3), now);
    state.step(StoreInput::Gone { connection: 2 }, now);
    state.step(come(3, 2, 3), now);
    let note = "127.0.0.1:9 was refused: a wrong token".to_owned();
    state.step(StoreInput::Rejected { note }, now);
    let due = now + Duration::from_secs(60);
    state.step(say(0, RankMessage::Heartbeat), due - MS);
    state.step(say(2, RankMessage::Heartbeat), due - MS);
    assert!(refusals(&state.step(StoreInput::Tick, due - MS)).is_empty());
    let actions = state.step(StoreInput::Tick, due);
    let error = refusal(&actions, &[1, 3]);
    assert!(error.is_rendezvous());
    assert_eq!(error.ranks(), [1]);
    assert_eq!(reports(&actions), [(0, vec![1]), (2, vec![1])]);
    let text = error.to_string();
    assert!(
        text.starts_with(
            "rendezvous: 2 of 3 ranks came within 60 s; missing: rank 1; start as many"
        )
    );
    assert!(text.contains("rank 2 (process 102 on here) came and went away again"));
    assert!(text.contains("a wrong token"));
    let late = state.step(come(4, 1, 3), due);
    assert_eq!(refusal(&late, &[4]).to_string(), text);
}

#[test]
fn contradictions_are_told_to_everyone() {
    let cases = [
        (
            other_process(2, 0, 3),
            "two processes came as rank 0: process 100 on here and process 900 on here",
        ),
        (
            come(2, 1, 2),
            "came with a world size of 2, but this job has 3",
        ),
        (
            come(2, 3, 3),
            "came as rank 3, but the ranks of this job are 0 to 2",
        ),
    ];
    for (event, text) in cases {
        let now = Instant::now();
        let mut state = StoreState::new(3);
        state.step(come(1, 0, 3), now);
        let error = refusal(&state.step(event, now), &[2, 1]);
        assert!(error.is_rendezvous());
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_rank_that_goes_may_come_again_soon() {
    let now = Instant::now();
    let mut state = StoreState::new(3);
    state.step(come(1, 0, 3), now);
    state.step(come(2, 1, 3), now);
    state.step(StoreInput::Gone { connection: 2 }, now);
    assert!(state.due().unwrap() <= now + RECONNECT_TIME);
    assert!(refusals(&state.step(StoreInput::Tick, now + RECONNECT_TIME - MS)).is_empty());
    state.step(come(3, 1, 3), now + RECONNECT_TIME - MS);
    assert!(refusals(&state.step(StoreInput::Tick, now + RECONNECT_TIME)).is_empty());

    let then = now + RECONNECT_TIME;
    state.step(StoreInput::Gone { connection: 3 }, then);
    let actions = state.step(StoreInput::Tick, then + RECONNECT_TIME);
    let error = refusal(&actions, &[1]);
    assert!(error.is_peer_lost());
    assert_eq!(error.ranks(), [1]);
    assert_eq!(reports(&actions), [(0, vec![1])]);
    assert_eq!(
        error.to_string(),
        "rank 1 (process 101 on here) was lost before the ranks had met: its connection to the \
         store ended: the process died, or the network broke"
    );
}

#[test]
fn a_silent_rank_is_lost_and_a_beating_one_is_not() {
    let start = Instant::now();
    let mut state = StoreState::new(3);
    state.step(come(1, 0, 3), start);
    state.step(come(2, 2, 3), start);
    let mut now = start;
    while now < start + LIVENESS - MS {
        now += 100 * MS;
        state.step(say(0, RankMessage::Heartbeat), now);
        let actions = state.step(StoreInput::Tick, now.min(start + LIVENESS - MS));
        assert!(refusals(&actions).is_empty());
    }
    let actions = state.step(StoreInput::Tick, start + LIVENESS);
    // The silent rank finds the refusal when it wakes up.
    let error = refusal(&actions, &[1, 2]);
    assert!(error.is_peer_lost());
    assert_eq!(error.ranks(), [2]);
    assert_eq!(reports(&actions), [(0, vec![2])]);
    let text = error.to_string();
    let head = "rank 2 (process 102 on here) has been silent for 2 s before the ranks had met: ";
    assert!(text.starts_with(head), "{text}");
}

#[test]
fn a_store_that_overslept_accuses_nobody() {
    let start = Instant::now();
    let mut state = StoreState::new(3);
    state.step(come(1, 0, 3), start);
    state.step(come(2, 2, 3), start);
    state.step(StoreInput::Gone { connection: 2 }, start);
    assert!(!state.was_suspended(None, start + LIVENESS));
    assert!(!state.was_suspended(Some(start), start + LIVENESS / 4));
    assert!(state.was_suspended(Some(start), start + LIVENESS / 4 + MS));
    let late = start + 10 * LIVENESS;
    state.step(StoreInput::Suspended, late);
    assert!(refusals(&state.step(StoreInput::Tick, late)).is_empty());
    assert!(refusals(&state.step(StoreInput::Tick, late + RECONNECT_TIME - MS)).is_empty());
    let error = refusal(&state.step(StoreInput::Tick, late + RECONNECT_TIME), &[1]);
    assert_eq!(error.ranks(), [2]);
}

#[test]
fn the_shortest_liveness_timeout_bounds_the_silence() {
    let start = Instant::now();
    let mut state = StoreState::new(3);
    let mut long = registration(0, 3);
    long.liveness = Duration::from_secs(3600);
    let mut short = registration(1, 3);
    short.liveness = Duration::from_millis(200);
    for (connection, registration) in [(1, long), (2, short)] {
        let event = StoreInput::Registered {
            connection,
            registration,
        };
        state.step(event, start);
    }
    // The rank with the short timeout sends heartbeats often, and the other one four times a second.
    let soon = start + Duration::from_millis(200);
    let error = refusal(&state.step(StoreInput::Tick, soon), &[1, 2]);
    assert_eq!(error.ranks(), [1]);
}

#[test]
fn a_testimony_ends_the_wait_of_everybody() {
    for (joined, text, expected) in [
        (
            true,
            "it was killed by SIGKILL",
            "rank 2 (process 102 on here) was killed by SIGKILL before the ranks had met",
        ),
        (
            true,
            "it ended with exit code 3; its last words: no such file",
            "rank 2 (process 102 on here) ended with exit code 3 before the ranks had met; its \
             last words: no such file",
        ),
        (
            false,
            "it ended with exit code 0",
            "rank 2 ended with exit code 0 before it joined: does its program call \
             Accelerator::new?",
        ),
        (
            false,
            "no process could be started",
            "rank 2 was lost before it joined: no process could be started",
        ),
    ] {
        let now = Instant::now();
        let mut state = StoreState::new(4);
        state.step(come(1, 0, 4), now);
        if joined {
            state.step(come(2, 2, 4), now);
            state.step(StoreInput::Gone { connection: 2 }, now);
        }
        let actions = state.step(exit_notice(2, text), now);
        let error = refusal(&actions, &[1]);
        assert!(error.is_peer_lost());
        assert_eq!(error.ranks(), [2]);
        assert_eq!(error.to_string(), expected);
        let late = refusal(&state.step(come(3, 1, 4), now), &[3]);
        assert_eq!(late.to_string(), expected);
        // A notice about an unknown rank changes nothing.
        assert!(state.step(exit_notice(9, text), now).is_empty());
    }
}

#[test]
fn whoever_dies_between_table_and_mesh_is_named_to_all() {
    let now = Instant::now();
    let mut state = met(4, now);
    state.step(say(0, RankMessage::Connected), now);
    state.step(StoreInput::Gone { connection: 12 }, now);
    assert!(refusals(&state.step(StoreInput::Tick, now)).is_empty());
    let actions = state.step(StoreInput::Tick, now + EXIT_NOTICE_WAIT);
    let error = refusal(&actions, &[11, 13]);
    assert!(error.is_peer_lost());
    assert_eq!(error.ranks(), [2]);
    assert!(
        error
            .to_string()
            .contains("before the ranks were connected")
    );
    // Rank 0 may be computing already.
    let [(connections, 2, text, Severity::RankLost)] = exit_notices(&actions)[..] else {
        panic!("unexpected {actions:?}");
    };
    assert_eq!(connections, [10, 11, 13]);
    assert!(text.contains("its connection to the store ended"));

    // The launcher knows the cause, and sooner.
    let mut state = met(4, now);
    state.step(StoreInput::Gone { connection: 12 }, now);
    let actions = state.step(exit_notice(2, "it was killed by SIGKILL"), now);
    let error = refusal(&actions, &[10, 11, 13]);
    assert!(error.to_string().contains("was killed by SIGKILL"));

    // A connected rank dies, which those that are not connected yet need to know.
    let mut state = met(3, now);
    state.step(say(1, RankMessage::Connected), now);
    let actions = state.step(exit_notice(1, "it was killed by SIGKILL"), now);
    assert!(refusals(&actions).is_empty());
    assert_eq!(exit_notices(&actions)[0].0, [10, 12]);

    // Silence is judged as before.
    let mut state = met(2, now);
    state.step(say(0, RankMessage::Heartbeat), now + LIVENESS - MS);
    let error = refusal(&state.step(StoreInput::Tick, now + LIVENESS), &[10, 11]);
    assert_eq!(error.ranks(), [1]);

    // The store no longer judges ranks that are connected.
    let mut state = met(3, now);
    state.step(say(1, RankMessage::Connected), now);
    state.step(StoreInput::Gone { connection: 11 }, now);
    state.step(say(0, RankMessage::Heartbeat), now + LIVENESS);
    state.step(say(2, RankMessage::Heartbeat), now + LIVENESS);
    assert!(refusals(&state.step(StoreInput::Tick, now + LIVENESS)).is_empty());
}

#[test]
fn a_testimony_does_not_overtake_the_last_words() {
    let now = Instant::now();
    let exit = "it ended with exit code 1";
    let blame = |rank| Error::about(Kind::Rendezvous, vec![rank], "cannot connect to rank 1");

    // The launcher reports the end of rank 2 before rank 2's reason has been read.
    let mut state = met(3, now);
    assert!(state.step(exit_notice(2, exit), now).is_empty());
    let actions = state.step(say(2, RankMessage::ReportFailure(blame(1))), now);
    let error = refusal(&actions, &[10, 11]);
    assert_eq!(error.ranks(), [1]);
    let told = exit_notices(&actions);
    assert_eq!(told.last().unwrap().2, exit);
    state.step(StoreInput::Gone { connection: 12 }, now);
    assert!(state.step(StoreInput::Tick, now + LIVENESS).is_empty());

    // Rank 2 had no reason to give. The end of its connection shows so, or the clock.
    for gone in [true, false] {
        let mut state = met(3, now);
        state.step(exit_notice(2, exit), now);
        let early = state.step(StoreInput::Tick, now + FINAL_MESSAGE_WAIT - MS);
        assert!(refusals(&early).is_empty());
        let (mut due, mut told) = (now + FINAL_MESSAGE_WAIT, vec![10, 11, 12]);
        if gone {
            (due, told) = (now, vec![10, 11]);
            state.step(StoreInput::Gone { connection: 12 }, now);
        }
        assert_eq!(state.due(), Some(due));
        let error = refusal(&state.step(StoreInput::Tick, due), &told);
        assert_eq!(error.ranks(), [2]);
        assert!(error.to_string().contains("exit code 1"), "{error}");
    }

    // Rank 2 is connected after all, or the store closes.
    let mut state = met(3, now);
    state.step(exit_notice(2, exit), now);
    let actions = state.step(say(2, RankMessage::Connected), now);
    assert_eq!(
        exit_notices(&actions),
        [(&[10, 11][..], 2, exit, Severity::RankLost)]
    );
    let mut state = met(3, now);
    state.step(exit_notice(2, exit), now);
    let actions = state.step(StoreInput::Closing { host: None }, now);
    assert_eq!(refusals(&actions)[0].1.ranks(), [2]);
    assert!(matches!(
        actions.last(),
        Some(StoreAction::CloseStore { .. })
    ));
}

#[test]
fn a_rank_that_gives_up_ends_the_wait_of_the_others() {
    let now = Instant::now();
    let mut state = met(4, now);
    state.step(say(3, RankMessage::Connected), now);
    let text = "rank 1 cannot connect to rank 0";
    let error = Error::about(Kind::Rendezvous, vec![0], text);
    let actions = state.step(say(1, RankMessage::ReportFailure(error)), now);
    let error = refusal(&actions, &[10, 12]);
    assert!(error.is_rendezvous());
    assert_eq!(error.ranks(), [0]);
    assert_eq!(reports(&actions), [(1, vec![0]), (2, vec![0])]);
    let [(connections, 1, told, Severity::RankLost)] = exit_notices(&actions)[..] else {
        panic!("unexpected {actions:?}");
    };
    assert_eq!(connections, [10, 12, 13]);
    assert_eq!(told, format!("it gave up: {text}"));

    let mut state = met(2, now);
    let error = refusal(&state.step(say(1, RankMessage::Leave), now), &[10]);
    assert!(
        error
            .to_string()
            .contains("left before the ranks were connected")
    );
}

#[test]
fn a_witness_is_heard_while_the_group_lives() {
    let now = Instant::now();
    let mut state = met(3, now);
    for rank in 0..3 {
        state.step(say(rank, RankMessage::Connected), now);
    }
    let panicked = Error::about(Kind::PeerLost, vec![1], "it panicked: boom");
    let actions = state.step(say(1, RankMessage::ReportFailure(panicked)), now);
    assert_eq!(reports(&actions), [(1, vec![1])]);
    let expected = (
        &[10, 12][..],
        1,
        "it said: it panicked: boom",
        Severity::ExitInfo,
    );
    assert_eq!(exit_notices(&actions), [expected]);

    let actions = state.step(exit_notice(1, "it ended with exit code 101"), now);
    let expected = (
        &[10, 12][..],
        1,
        "it ended with exit code 101",
        Severity::RankLost,
    );
    assert_eq!(exit_notices(&actions), [expected]);

    // The end of a rank that has left in good order is no loss.
    let actions = state.step(say(2, RankMessage::Leave), now);
    assert!(matches!(
        &actions[..],
        [StoreAction::Report(Report::Closed { rank: 2 })]
    ));
    let actions = state.step(exit_notice(2, "it ended with exit code 0"), now);
    assert_eq!(exit_notices(&actions)[0].3, Severity::ExitInfo);
}

#[test]
fn who_waits_is_told_whom_for() {
    let start = Instant::now();
    let mut state = StoreState::new(4);
    state.step(come(1, 0, 4), start);
    state.step(come(2, 2, 4), start + Duration::from_secs(1));
    let mut told = Vec::new();
    let mut now = start;
    while now < start + Duration::from_secs(50) {
        state.step(say(0, RankMessage::Heartbeat), now);
        state.step(say(2, RankMessage::Heartbeat), now);
        for action in state.step(StoreInput::Tick, now) {
            if let StoreAction::ReportMissing {
                connection,
                missing,
            } = action
            {
                assert_eq!(missing, [1, 3]);
                told.push((connection, (now - start).as_secs()));
            }
        }
        now = state.due().unwrap();
    }
    assert_eq!(told, [(1, 5), (2, 6), (1, 35), (2, 36)]);
}

#[test]
fn signs_of_life_are_given_until_all_are_connected() {
    let now = Instant::now();
    let mut state = met(2, now);
    let beats = |actions: Vec<StoreAction>| {
        let beats = actions.into_iter().find_map(|action| match action {
            StoreAction::Heartbeat { connections } => Some(connections),
            _ => None,
        });
        beats.unwrap_or_default()
    };
    assert_eq!(beats(state.step(StoreInput::Tick, now)), [10, 11]);
    assert!(beats(state.step(StoreInput::Tick, now + 10 * MS)).is_empty());
    state.step(say(0, RankMessage::Connected), now);
    assert_eq!(beats(state.step(StoreInput::Tick, now + 250 * MS)), [11]);
}

#[test]
fn closing_is_a_failure_for_those_who_still_wait() {
    let now = Instant::now();
    let mut state = StoreState::new(3);
    state.step(come(1, 1, 3), now);
    let error = refusal(&state.step(StoreInput::Closing { host: None }, now), &[1]);
    assert!(error.is_rendezvous());
    assert!(error.to_string().contains("missing: ranks 0 and 2"));

    let mut state = met(3, now);
    let actions = state.step(StoreInput::Closing { host: Some(0) }, now);
    let error = refusal(&actions, &[10, 11, 12]);
    assert!(error.is_peer_lost());
    assert_eq!(error.ranks(), [0]);

    // Rank 0 is connected and leaves, and the others do not need it any more.
    let mut state = met(3, now);
    state.step(say(0, RankMessage::Connected), now);
    let actions = state.step(StoreInput::Closing { host: Some(0) }, now);
    assert!(
        matches!(&actions[..], [StoreAction::CloseStore { connections }] if connections.len() == 3)
    );
}

#[derive(Clone, Debug)]
enum Move {
    Come(usize),
    Connect(usize),
    ReportFailure(usize),
    Beat(usize),
    Go(usize),
    Leave(usize),
    Sleep(u64),
    ReportExit(usize),
    Wait(u64),
}

fn any_move() -> impl Strategy<Value = Move> {
    prop_oneof![
        8 => (0_usize..4).prop_map(Move::Come),
        1 => (0_usize..5).prop_map(Move::Come),
        4 => (0_usize..4).prop_map(Move::Connect),
        1 => (0_usize..4).prop_map(Move::ReportFailure),
        4 => (0_usize..4).prop_map(Move::Beat),
        1 => (0_usize..20).prop_map(Move::Go),
        1 => (0_usize..4).prop_map(Move::Leave),
        1 => (0_u64..5000).prop_map(Move::Sleep),
        1 => (0_usize..5).prop_map(Move::ReportExit),
        3 => (0_u64..1000).prop_map(Move::Wait),
    ]
}

proptest! {
    /// Every connection gets at most one table and at most one refusal. A table goes to every rank once and never after
    /// a failure. Every waiting rank learns of a failure, and no message goes to a rank that has gone. Losses are
    /// judged only at ticks, and a tick leaves nothing due.
    #[test]
    fn everyone_gets_an_answer(moves in proptest::collection::vec(any_move(), 0..60)) {
        let mut now = Instant::now();
        let mut state = StoreState::new(4);
        // The ranks of the connections that are present.
        let mut present: HashMap<Connection, usize> = HashMap::new();
        let mut refused: HashSet<Connection> = HashSet::new();
        let mut welcomed: HashSet<Connection> = HashSet::new();
        let mut failed = false;
        for (connection, next) in moves.into_iter().enumerate() {
            let connection = connection as Connection;
            let mut judging = false;
            let event = match next {
                Move::Come(rank) => {
                    present.insert(connection, rank);
                    come(connection, rank, 4)
                }
                Move::Connect(rank) => say(rank, RankMessage::Connected),
                Move::ReportFailure(rank) => {
                    let error = Error::about(Kind::PeerLost, vec![(rank + 1) % 4], "gone");
                    say(rank, RankMessage::ReportFailure(error))
                }
                Move::Beat(rank) => say(rank, RankMessage::Heartbeat),
                Move::Go(at) => {
                    let mut all: Vec<Connection> = present.keys().copied().collect();
                    all.sort_unstable();
                    let Some(&connection) = all.get(at) else { continue };
                    present.remove(&connection);
                    StoreInput::Gone { connection }
                }
                Move::Leave(rank) => say(rank, RankMessage::Leave),
                Move::Sleep(time) => {
                    now += Duration::from_millis(time);
                    StoreInput::Suspended
                }
                Move::ReportExit(rank) => exit_notice(rank, "it was killed by SIGKILL"),
                Move::Wait(pause) => {
                    now += Duration::from_millis(pause);
                    judging = true;
                    StoreInput::Tick
                }
            };
            let mourning = matches!(event, StoreInput::Gone { .. } | StoreInput::Suspended);
            let before = matches!(state.phase, Phase::Failed(_));
            let actions = state.step(event, now);
            let after = matches!(state.phase, Phase::Failed(_));
            prop_assert!(!mourning || actions.is_empty());
            for action in &actions {
                match action {
                    StoreAction::CloseStore { .. } | StoreAction::TellNextPlace { .. } => {
                        prop_assert!(false)
                    }
                    StoreAction::Heartbeat { connections } => {
                        prop_assert!(judging && !after);
                        prop_assert!(connections.iter().all(|x| present.contains_key(x)));
                    }
                    StoreAction::Refuse { connection, .. } => {
                        prop_assert!(present.contains_key(connection));
                        prop_assert!(refused.insert(*connection));
                    }
                    StoreAction::Report(Report::Met) => prop_assert!(welcomed.is_empty()),
                    StoreAction::Report(_) => {}
                    StoreAction::ReportMissing { connection, missing } => {
                        prop_assert!(judging && !missing.is_empty());
                        prop_assert!(present.contains_key(connection));
                    }
                    StoreAction::ReportExit { connections, rank, .. } => {
                        for connection in connections {
                            prop_assert!(present.contains_key(connection));
                            prop_assert!(welcomed.contains(connection));
                            prop_assert!(present[connection] != *rank);
                        }
                    }
                    StoreAction::Welcome { connections, ranks } => {
                        prop_assert!(!failed && welcomed.is_empty());
                        prop_assert_eq!(ranks.len(), 4);
                        prop_assert!(ranks.iter().enumerate().all(|(i, x)| x.rank == i));
                        for connection in connections {
                            prop_assert!(present.contains_key(connection));
                            prop_assert!(welcomed.insert(*connection));
                        }
                    }
                }
            }
            if after && !before {
                // All waiting ranks get the failure, except for the one that reported it.
                for connection in present.keys() {
                    let waits = state.ranks.values().any(|x| {
                        x.connection == Some(*connection) && x.stage == JoinStage::Waiting
                    });
                    let told = matches!(next, Move::ReportFailure(rank) if present[connection] == rank);
                    prop_assert!(!waits || told || refused.contains(connection));
                }
            }
            prop_assert!(!before || after, "a failure is final");
            failed = after;
            if judging {
                prop_assert!(state.due().is_none_or(|due| due > now));
            }
        }
    }
}
