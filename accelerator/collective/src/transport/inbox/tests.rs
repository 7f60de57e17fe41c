use super::*;
use crate::{
    error::{Error, Kind},
    transport::{
        OpPhase, Peer, PeerLocation, Tag, peers,
        tests::{deadline, number},
    },
};

const LONG: Duration = Duration::from_secs(50);

#[test]
fn who_is_blamed_is_gone_and_who_blames_is_not() {
    let inbox = Inbox::new(5);
    let abort = |rank: usize| {
        let peer = Peer {
            rank,
            location: PeerLocation::Thread,
        };
        let culprit = peer.culprit("it died", Certainty::Settled);
        Abort {
            group: GroupId::WORLD,
            sequence: 3,
            error: Error::blaming(Kind::PeerLost, culprit, "it died"),
        }
    };
    assert!(inbox.gone().is_empty());
    inbox.aborted(1, abort(2));
    assert_eq!(inbox.gone(), [2]);
    // Blame of this rank, 0, counts, and blame of an unknown rank does not.
    inbox.aborted(1, abort(0));
    inbox.aborted(1, abort(9));
    inbox.aborted(3, abort(3));
    assert_eq!(inbox.gone(), [0, 2, 3]);
    // The connection of rank 1 ends after its final message.
    inbox.lost(1, "its connection ended", Certainty::Guessed);
    assert_eq!(inbox.gone(), [0, 2, 3]);
    assert_eq!(inbox.wait_for_final_messages(0, Duration::ZERO), [2, 4]);
    inbox.left(4, GroupId::WORLD, LeaveKind::Dropped);
    assert_eq!(inbox.gone(), [0, 2, 3, 4]);
}

#[test]
fn a_connection_that_ends_without_a_word_is_blamed_where_nobody_says_more() {
    let inbox = Inbox::new(3);
    let peers = peers(3);
    inbox.lost(1, "its connection ended", Certainty::Guessed);
    inbox.check(1, &peers, &deadline(0, LONG)).unwrap();
    let culprit = peers[2].culprit("it died", Certainty::Settled);
    let error = Error::blaming(Kind::PeerLost, culprit, "it died");
    inbox.aborted(
        2,
        Abort {
            group: GroupId::WORLD,
            sequence: 0,
            error,
        },
    );
    let error = inbox.check(1, &peers, &deadline(0, LONG)).unwrap_err();
    assert_eq!(error.ranks(), [2], "{error}");
}

#[test]
fn a_rank_that_is_told_of_a_lost_one_says_where_it_was_itself() {
    let inbox = Inbox::new(3);
    let peers = peers(3);
    let culprit = peers[2].culprit("it died", Certainty::Settled);
    let message = "rank 2 is lost: it died; rank 1 was in collective #7";
    let error = Error::blaming(Kind::PeerLost, culprit, message);
    inbox.aborted(
        1,
        Abort {
            group: GroupId::WORLD,
            sequence: 7,
            error,
        },
    );
    let error = inbox.check_abort(&peers, &deadline(8, LONG)).unwrap_err();
    assert_eq!(error.ranks(), [2], "{error}");
    assert_eq!(error.culprit().unwrap().cause(), "it died");
    let text = error.to_string();
    assert!(text.contains("rank 0 was in collective #8"), "{text}");
    assert!(!text.contains("rank 1"), "{text}");
}

fn note_waiting(inbox: &Inbox, rank: usize, awaited: Option<usize>) {
    let heartbeat = Heartbeat {
        awaited,
        active: None,
    };
    inbox.on_heartbeat(rank, heartbeat, Instant::now());
}

#[test]
fn who_waits_for_another_is_not_the_one_that_is_missing() {
    let inbox = Inbox::new(5);
    let deadline = deadline(0, LONG);
    let roots = |missing: &[usize]| inbox.roots(missing.to_vec(), &deadline);
    assert_eq!(roots(&[1, 2]), [1, 2]);
    note_waiting(&inbox, 1, Some(2));
    note_waiting(&inbox, 2, Some(3));
    assert_eq!(roots(&[1, 2, 4]), [3, 4]);
    note_waiting(&inbox, 2, None);
    assert_eq!(roots(&[1]), [2]);
    // A cycle, a chain through this rank, and an unknown rank end the search.
    note_waiting(&inbox, 2, Some(1));
    note_waiting(&inbox, 4, Some(0));
    note_waiting(&inbox, 3, Some(9));
    assert_eq!(roots(&[1, 4]), [1, 4]);
    assert_eq!(roots(&[3]), [3]);
}

/// A rank that got its data says so only in its next heartbeat.
#[test]
fn for_whom_a_rank_waited_before_does_not_count() {
    let inbox = Inbox::new(3);
    note_waiting(&inbox, 2, Some(1));
    let deadline = deadline(0, LONG);
    assert_eq!(inbox.roots(vec![2], &deadline), [2]);
    note_waiting(&inbox, 2, Some(1));
    assert_eq!(inbox.roots(vec![2], &deadline), [1]);
}

#[test]
fn each_operation_finds_its_own_parts() {
    let inbox = Inbox::new(2);
    let peers = peers(2);
    let part = |sequence, index| RecvChunk {
        tag: Tag {
            group: GroupId::WORLD,
            sequence,
            phase: OpPhase::Reduce,
            index,
        },
        fingerprint: None,
        payload: PooledBuffer::default(),
    };
    for (sequence, index) in [(6, 0), (5, 0), (6, 1), (5, 1), (9, 0)] {
        inbox.push(1, part(sequence, index));
    }
    let poll = |sequence, position| {
        let mut deadline = deadline(sequence, LONG);
        let chunk = inbox.poll(1, position, &peers, &mut deadline).unwrap();
        chunk.map(|chunk| (chunk.tag.sequence, chunk.tag.index))
    };
    assert_eq!(poll(5, OpPosition::First), Some((5, 0)));
    assert_eq!(poll(6, OpPosition::Later), Some((6, 0)));
    assert_eq!(poll(7, OpPosition::Later), None);
    assert_eq!(poll(5, OpPosition::First), Some((5, 1)));
    // The peer has finished 5, or it would not have begun 9.
    assert_eq!(poll(5, OpPosition::First), Some((9, 0)));
    // A chunk of a finished operation is left.
    assert_eq!(poll(7, OpPosition::Later), None);
    assert_eq!(poll(7, OpPosition::First), Some((6, 1)));
    assert_eq!(poll(7, OpPosition::First), None);
}

#[test]
fn what_a_peer_began_last_is_known_when_its_parts_are_taken() {
    let inbox = Inbox::new(3);
    for (sequence, fingerprint) in [(4, Some(deadline(4, LONG).fingerprint)), (5, None)] {
        inbox.push(
            1,
            RecvChunk {
                tag: Tag {
                    group: GroupId::WORLD,
                    sequence,
                    phase: OpPhase::Reduce,
                    index: 0,
                },
                fingerprint,
                payload: inbox.chunk(0),
            },
        );
    }
    inbox.close();
    let text = number(0).describe(&inbox.last_op(1).unwrap());
    assert!(
        text.starts_with("collective #4, barrier at here.rs:1, "),
        "{text}"
    );
    assert!(text.ends_with(" ago"), "{text}");
    assert!(inbox.last_op(2).is_none() && inbox.last_op(9).is_none());
}
