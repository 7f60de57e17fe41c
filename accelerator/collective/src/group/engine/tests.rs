use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use super::*;
use crate::{
    buffer::Buffer,
    element::{DType, ReduceOp},
    fingerprint::{CallSite, OpKind},
    group::GroupOptions,
    shard_layout::ShardLayout,
    topology::TransportKind,
    transport::{
        CHUNK, ControlPlane, DataPlane, FinalMessage, GroupId, Inbox, Poller, peers, tests::number,
    },
};

/// A transport that records what this rank, 0 of 2, sends to the other.
#[derive(Debug)]
struct Notes {
    inbox: Arc<Inbox>,
    sent: Mutex<Vec<(Tag, usize)>>,
}

impl Notes {
    fn new() -> Self {
        Self {
            inbox: Arc::new(Inbox::new(2)),
            sent: Mutex::default(),
        }
    }

    /// Delivers a chunk as if the other rank had sent it.
    fn arrive(
        &self,
        phase: OpPhase,
        index: u32,
        fingerprint: Option<CollectiveFingerprint>,
        payload: &[u8],
    ) {
        let mut chunk = self.inbox.chunk(payload.len());
        chunk.bytes_mut().copy_from_slice(payload);
        let tag = Tag {
            group: GroupId::WORLD,
            sequence: 0,
            phase,
            index,
        };
        let received = RecvChunk {
            tag,
            fingerprint,
            payload: chunk,
        };
        assert!(self.inbox.push(1, received));
    }

    fn sent(&self, phase: OpPhase) -> Vec<usize> {
        let sent = self.sent.lock().unwrap();
        let parts = sent.iter().filter(|(tag, _)| tag.phase == phase);
        parts.map(|(_, len)| *len).collect()
    }
}

impl DataPlane for Notes {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn send(
        &self,
        _: usize,
        chunk: OutgoingChunk<'_>,
        _: &mut OpDeadline,
        _: Option<&Poller>,
    ) -> Result<()> {
        let mut sent = self.sent.lock().unwrap();
        sent.push((chunk.tag, chunk.payload.len()));
        Ok(())
    }

    fn wait_for_arrival(&self, _: u64, _: Instant, _: Option<&Poller>) {
        unreachable!("the operation is resumed by the test");
    }
}

impl ControlPlane for Notes {
    fn leave(&self, _: &FinalMessage) {}

    fn last_activity(&self, _: usize) -> Option<Instant> {
        None
    }
}

/// A rank that keeps nothing waits for no data, and no results come back. It must still not fill the other rank's
/// queue.
#[test]
fn a_rank_sends_no_more_ahead_than_the_other_has_shown_to_have_taken() {
    let rounds = 40;
    let len = rounds * CHUNK;
    let mut buffer = Buffer::zeroed(DType::U8, len);
    let parts = vec![Vec::new(), vec![0..CHUNK - 1, 2 * CHUNK - 1..len]];
    let shards = Arc::new(ShardLayout::new(len, parts).unwrap());
    // The gap is as long as a chunk, and the first chunk has elements on both sides of it.
    let rounds = rounds - 1;
    let fingerprint =
        CollectiveFingerprint::new(OpKind::ReduceScatterBuffer, CallSite::new("here.rs", 1))
            .with_op(ReduceOp::Sum)
            .with_data(DType::U8, len);
    let timeouts = GroupOptions::new().op_timeouts();
    let notes = Arc::new(Notes::new());
    let transport = Transport::new(
        peers(2),
        Arc::clone(&notes.inbox),
        notes.clone(),
        Some(notes.clone()),
    );
    let mut deadline = OpDeadline::new(
        0,
        number(0),
        fingerprint,
        timeouts,
        std::time::Instant::now(),
    );
    let mut scratch = Scratch::default();
    scratch.clear(2);
    let op = BufferOp::ReduceScatter(ReduceOp::Sum, Arc::clone(&shards));
    let mut reduction = op.begin(DType::U8, len, 2);
    let mut go_on = || {
        let mut ctx =
            OpContext::resumed(&transport, &mut deadline, &mut scratch, OpPosition::First);
        reduction.advance(&mut ctx, buffer.bytes_mut()).unwrap()
    };
    assert_eq!(go_on(), OpProgress::Waiting(1..2));
    assert_eq!(notes.sent(OpPhase::Header), [shards.digest().len()]);
    assert_eq!(notes.sent(OpPhase::Reduce).len(), PREFETCH);
    notes.arrive(OpPhase::Header, 0, Some(fingerprint), shards.digest());
    for round in 0..rounds {
        assert_eq!(go_on(), OpProgress::Waiting(1..2));
        let sent = notes.sent(OpPhase::Reduce);
        assert_eq!(sent.len(), rounds.min(round + PREFETCH + 1));
        notes.arrive(OpPhase::Reduce, round as u32, None, &[]);
    }
    assert_eq!(go_on(), OpProgress::Done);
    assert!(notes.sent(OpPhase::Gather).is_empty(), "no results travel");
    let sent = notes.sent(OpPhase::Reduce);
    assert_eq!(sent, vec![CHUNK; rounds]);
}
