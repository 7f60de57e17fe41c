//! Streams that are read in rounds, by every rank or by rank 0 for all.

use core::iter;
use std::sync::Arc;

use accelerator_plan::{BatchKind, EpochPlan, TailPolicy};
use ciborium::Value;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{PartReader, SampleStream, StreamPart, StreamPass, Streamed, until_last};
use crate::core::agreement::Failure;
use crate::core::error::{Error, Kind, Result, caught};
use crate::data::batch::{Batch, BatchInfo, StepShare};
use crate::data::epoch::{Ahead, PrefetchedBatches};
use crate::data::exchange_step::{PURPOSE, ReadPosition};
use crate::data::source::DeferredBatch;

/// Returns this rank's batches of a stream that every rank reads as a whole.
pub(super) fn interleaved<S: SampleStream, O: Send + 'static>(
    streamed: Arc<Streamed<S, O>>,
    pass: StreamPass,
) -> PrefetchedBatches<O> {
    let mut rounds = StreamRounds::new(streamed, pass.clone());
    pass.read_ahead(iter::from_fn(move || rounds.next_batch().transpose()))
}

/// Returns this rank's batches of a stream that rank 0 reads for all.
pub(super) fn dispatched<S, O>(
    streamed: Arc<Streamed<S, O>>,
    pass: StreamPass,
) -> PrefetchedBatches<O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: Send + 'static,
{
    let ahead = (pass.rank() == 0).then(|| {
        let mut rounds = StreamRounds::new(streamed.clone(), pass.clone());
        pass.read_ahead(iter::from_fn(move || rounds.next_dispatch().transpose()))
    });
    let mut batches = DispatchedBatches {
        ahead,
        step: pass.first_step(),
        pass,
        streamed,
    };
    until_last(move || batches.read())
}

/// Reads a whole stream in rounds: the samples that all ranks use in a step.
struct StreamRounds<S: SampleStream, O> {
    /// The number of samples used before the next round.
    before: u64,
    /// The first samples of the stream, where the last round is filled up with them.
    first: Vec<S::Item>,
    has_ended: bool,
    pass: StreamPass,
    /// The reader; `None` before the first round.
    reader: Option<PartReader<S::Item>>,
    /// The step of the next round.
    step: u64,
    streamed: Arc<Streamed<S, O>>,
}

/// The samples that all ranks use in one step.
struct StreamRound<I> {
    items: Vec<I>,
    division: EpochPlan,
    /// The division of the samples that show if there is a next round; `None` if it cannot be read.
    next: Option<EpochPlan>,
    /// The place in the stream of the first of the items that are not padding.
    offset: u64,
    padding: usize,
    step: u64,
}

impl<S: SampleStream, O: 'static> StreamRounds<S, O> {
    fn new(streamed: Arc<Streamed<S, O>>, pass: StreamPass) -> Self {
        let left_out = pass.skip.saturating_mul(pass.plan.global_batch());
        Self {
            before: pass.start.consumed.saturating_add(left_out),
            first: Vec::new(),
            has_ended: false,
            reader: None,
            step: pass.first_step(),
            pass,
            streamed,
        }
    }

    /// This rank's batch of the next round.
    fn next_batch(&mut self) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let Some(round) = self.next()? else {
            return Ok(None);
        };
        let Some(own) = round.rank_batch(self.pass.rank(), &self.pass) else {
            return Ok(None);
        };
        let items = round.into_items(&own);
        Ok(Some(self.streamed.batch(&self.pass, items, own.info)))
    }

    fn next(&mut self) -> Result<Option<StreamRound<S::Item>>> {
        if self.has_ended {
            return Ok(None);
        }
        // Behind an error there is nothing.
        self.has_ended = true;
        let (size, lookahead) = (self.size(), self.lookahead());
        let reader = match &mut self.reader {
            Some(reader) => reader,
            None => {
                let opened = self.open()?;
                self.reader.insert(opened)
            }
        };
        let new = reader.take(size)?;
        if new.is_empty() {
            return Ok(None);
        }
        let is_full = new.len() == size;
        let next = match is_full {
            true => reader.peek(lookahead),
            false => Some(0),
        };
        self.has_ended = next == Some(0);
        let pads = self.pass.spec.tail == TailPolicy::Pad;
        let mut items = match pads && !is_full {
            true => self.first.clone(),
            false => Vec::new(),
        };
        if pads && is_full && self.first.is_empty() {
            self.first = new.clone();
        }
        let (offset, padding) = (self.before, items.len());
        self.before += new.len() as u64;
        self.step += 1;
        items.extend(new);
        Ok(Some(StreamRound {
            division: self.pass.divide(items.len(), padding)?,
            items,
            next: next.map(|next| self.pass.divide(next, 0)).transpose()?,
            offset,
            padding,
            step: self.step - 1,
        }))
    }

    fn open(&mut self) -> Result<PartReader<S::Item>> {
        let (stream, part) = (&self.streamed.stream, StreamPart::whole(self.pass.epoch));
        if self.pass.spec.tail == TailPolicy::Pad && self.before > 0 {
            self.first = PartReader::open(stream, part, 0)?.take(self.size())?;
        }
        PartReader::open(stream, part, self.before)
    }

    /// Returns how many samples of the next round show if this rank has a batch in it.
    fn lookahead(&self) -> usize {
        match self.pass.spec.tail {
            TailPolicy::Exact | TailPolicy::Pad => 1,
            TailPolicy::Drop => self.size(),
            TailPolicy::Uneven => self.pass.plan.share(self.pass.rank()).start as usize + 1,
        }
    }

    /// The samples of a full round, which lie in memory.
    fn size(&self) -> usize {
        self.pass.plan.global_batch() as usize
    }
}

/// The batch of one rank in a round.
struct RankBatch {
    info: BatchInfo,
    /// The numbers of its samples among the items.
    chosen: Vec<usize>,
}

impl<I: Clone> StreamRound<I> {
    /// Returns the batch of a rank; `None` if it has nothing to do any more.
    fn rank_batch(&self, rank: usize, pass: &StreamPass) -> Option<RankBatch> {
        let planned = self.division.batch(rank, 0)?;
        let new = (self.items.len() - self.padding) as u64;
        let chosen: Vec<_> = planned.indices.iter().map(|&i| i as usize).collect();
        let place = |&index: &usize| match index.checked_sub(self.padding) {
            Some(new) => self.offset + new as u64,
            None => index as u64,
        };
        let info = BatchInfo {
            consumed: self.offset + new,
            epoch: pass.epoch,
            indices: chosen.iter().map(place).collect(),
            is_last: self.next.as_ref().is_some_and(|next| next.steps(rank) == 0),
            len: chosen.len(),
            real: planned.real,
            share: match planned.kind {
                BatchKind::Idle => StepShare::Idle,
                BatchKind::Real => StepShare::Used,
            },
            step: self.step,
            uneven: pass.spec.is_uneven(),
        };
        Some(RankBatch { info, chosen })
    }

    fn items(&self, of: &RankBatch) -> Vec<I> {
        of.chosen.iter().map(|&i| self.items[i].clone()).collect()
    }

    /// Returns [`items`](Self::items) by value, if they are needed for nothing else.
    fn into_items(mut self, of: &RankBatch) -> Vec<I> {
        let is_run = of.chosen.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        match (of.chosen.first(), of.chosen.last()) {
            (Some(&first), Some(&last)) if is_run => self.items.drain(first..=last).collect(),
            _ => self.items(of),
        }
    }
}

struct DispatchedBatches<S: SampleStream, O> {
    /// The steps that rank 0 reads, ahead of the training.
    ahead: Option<Ahead<Dispatch<O>>>,
    pass: StreamPass,
    /// The step of the next batch.
    step: u64,
    streamed: Arc<Streamed<S, O>>,
}

/// The batches of rank 0 for one step.
struct Dispatch<O> {
    own: Batch<DeferredBatch<O>>,
    /// One message per rank; rank 0's own is not used.
    messages: Vec<DispatchMessage>,
}

/// The message of rank 0 to another rank.
#[derive(Clone, Deserialize, Serialize)]
enum DispatchMessage {
    /// The samples are bytes, which serde takes as such, and not one by one.
    Batch(BatchInfo, Value),
    End,
    Failed(Failure),
}

impl<S, O> DispatchedBatches<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: Send + 'static,
{
    /// Reads rank 0's batch for this rank, made on every rank or on none.
    fn read(&mut self) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let ahead = self.ahead.as_mut().map(Iterator::next);
        if self.pass.world_size() == 1 {
            let dispatched = ahead.flatten().transpose()?;
            return Ok(dispatched.map(|dispatch| dispatch.own));
        }
        let position = self.pass.position(self.step);
        let batch = match ahead {
            Some(ahead) => self.send(position, ahead),
            None => self.receive(position),
        };
        // Each rank makes its own before the ranks exchange the step.
        let seed = self.pass.seed_of_batch(self.step);
        let batch = batch.and_then(|batch| batch.map(|batch| batch.resolved(seed)).transpose());
        self.step = self.step.saturating_add(1);
        let made = batch.as_ref().map(|_| ());
        let action = "make its batch of the stream";
        self.pass.exchange(position.step, made, action)?;
        batch
    }

    /// Sends what was read to the others.
    fn send(
        &self,
        position: ReadPosition,
        ahead: Option<Result<Dispatch<O>>>,
    ) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let same = |message| vec![message; self.pass.world_size()];
        let (own, messages) = match ahead {
            Some(Ok(Dispatch { own, messages })) => (Ok(Some(own)), messages),
            Some(Err(error)) => {
                let failure = Failure::of(&error);
                (Err(error), same(DispatchMessage::Failed(failure)))
            }
            None => (Ok(None), same(DispatchMessage::End)),
        };
        let messages: Vec<_> = messages
            .into_iter()
            .map(|message| (position, message))
            .collect();
        let sent = self.scatter(Some(&messages));
        // The reader's own error is the cause.
        let own = own?;
        sent?;
        Ok(own)
    }

    fn receive(&self, position: ReadPosition) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let message = self.scatter(None)?;
        match message {
            // Of no use here: the exchange of the step below fails.
            (sent_for, _) if sent_for != position => Ok(None),
            (_, DispatchMessage::End) => Ok(None),
            (_, DispatchMessage::Failed(failure)) => Err(failure.into_error(0, "read the stream")),
            (_, DispatchMessage::Batch(info, bytes)) => caught("making a batch", || {
                let items = decode(bytes.as_bytes().map_or(&[], Vec::as_slice))?;
                Ok(Some(self.streamed.batch(&self.pass, items, info)))
            }),
        }
    }

    /// Sends each rank its message, from rank 0; returns this rank's own.
    fn scatter(
        &self,
        messages: Option<&[(ReadPosition, DispatchMessage)]>,
    ) -> Result<(ReadPosition, DispatchMessage)> {
        let group = self.pass.context.shared.group().for_purpose(PURPOSE);
        let group = group.for_caller(self.pass.caller);
        Ok(group.scatter_object(messages, 0)?)
    }
}

impl<S, O> StreamRounds<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: 'static,
{
    /// The batches of the next round, with what the others get packed.
    fn next_dispatch(&mut self) -> Result<Option<Dispatch<O>>> {
        let Some(round) = self.next()? else {
            return Ok(None);
        };
        let pass = &self.pass;
        let Some(own) = round.rank_batch(0, pass) else {
            return Ok(None);
        };
        let mut messages = vec![DispatchMessage::End];
        for rank in 1..pass.world_size() {
            messages.push(match round.rank_batch(rank, pass) {
                Some(batch) => {
                    let bytes = Value::Bytes(encode(&round.items(&batch))?);
                    DispatchMessage::Batch(batch.info, bytes)
                }
                None => DispatchMessage::End,
            });
        }
        // As the others get theirs, so that what cannot travel fails on any number of ranks.
        let items = decode(&encode(&round.into_items(&own))?)?;
        Ok(Some(Dispatch {
            own: self.streamed.batch(pass, items, own.info),
            messages,
        }))
    }
}

fn encode<I: Serialize>(items: &[I]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match ciborium::into_writer(items, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(travel("written", error)),
    }
}

fn decode<I: DeserializeOwned>(bytes: &[u8]) -> Result<Vec<I>> {
    ciborium::from_reader(bytes).map_err(|error| travel("read", error))
}

fn travel(what: &str, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let message = format!(
        "samples of a dispatched stream travel from rank 0 through serde, and cannot be {what}"
    );
    Error::new(Kind::Data, message).with_source(error)
}
