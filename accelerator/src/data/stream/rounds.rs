//! Streams that are read in rounds, and this rank's batches of a stream that every rank reads.

use core::fmt;

use accelerator_plan::{BatchKind, EpochPlan, TailPolicy};
use serde::de::{DeserializeOwned, Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{PartReader, SampleStream, StreamPart, StreamPass, Streamed};
use crate::core::agreement::Failure;
use crate::core::error::{Error, Kind, Result, caught};
use crate::data::batch::{Batch, BatchInfo, StepShare};
use crate::data::epoch::{Ahead, read_ahead};
use crate::data::exchange_step::{PURPOSE, ReadPosition, exchange_step};
use crate::data::source::DeferredBatch;

/// Reads a whole stream in rounds: the samples that all ranks use in a step.
pub(super) struct StreamRounds<I> {
    /// The number of samples used before the next round.
    before: u64,
    /// The first samples of the stream, where the last round is filled up with them.
    first: Vec<I>,
    has_ended: bool,
    pass: StreamPass,
    reader: PartReader<I>,
    /// The step of the next round.
    step: u64,
}

/// The samples that all ranks use in one step.
pub(super) struct StreamRound<I> {
    pub(super) items: Vec<I>,
    division: EpochPlan,
    /// The division of the samples that show if there is a next round; `None` if it cannot be read.
    next: Option<EpochPlan>,
    /// The place in the stream of the first of the items that are not padding.
    offset: u64,
    padding: usize,
    step: u64,
}

impl<I: Clone> StreamRounds<I> {
    /// The rounds of a pass, which are read from the first time on that somebody asks for them.
    pub(super) fn opened<'a, S: SampleStream<Item = I>>(
        rounds: &'a mut Option<Self>,
        stream: &S,
        pass: &StreamPass,
    ) -> Result<&'a mut Self> {
        match rounds {
            Some(rounds) => Ok(rounds),
            None => Ok(rounds.insert(Self::open(stream, pass.clone())?)),
        }
    }

    fn open<S: SampleStream<Item = I>>(stream: &S, pass: StreamPass) -> Result<Self> {
        let part = StreamPart::whole(pass.epoch);
        let size = pass.plan.global_batch();
        let before = pass
            .start
            .consumed
            .saturating_add(pass.skip.saturating_mul(size));
        let first = match pass.spec.tail() {
            TailPolicy::Pad if before > 0 => {
                PartReader::open(stream, part, 0)?.take(size as usize)?
            }
            _ => Vec::new(),
        };
        Ok(Self {
            before,
            first,
            has_ended: false,
            reader: PartReader::open(stream, part, before)?,
            step: pass.first_step(),
            pass,
        })
    }

    pub(super) fn next(&mut self) -> Result<Option<StreamRound<I>>> {
        if self.has_ended {
            return Ok(None);
        }
        // Behind an error there is nothing.
        self.has_ended = true;
        let new = self.reader.take(self.size())?;
        if new.is_empty() {
            return Ok(None);
        }
        let is_full = new.len() == self.size();
        let next = match is_full {
            true => self.reader.peek(self.lookahead()),
            false => Some(0),
        };
        self.has_ended = next == Some(0);
        let pads = self.pass.spec.tail() == TailPolicy::Pad;
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

    /// Returns how many samples of the next round show if this rank has a batch in it.
    fn lookahead(&self) -> usize {
        match self.pass.spec.tail() {
            TailPolicy::Exact | TailPolicy::Pad => 1,
            TailPolicy::Drop => self.size(),
            // A round lies in memory.
            TailPolicy::Uneven => self.pass.plan.share(self.pass.rank()).start as usize + 1,
        }
    }

    /// The samples of a full round.
    fn size(&self) -> usize {
        // A round lies in memory.
        self.pass.plan.global_batch() as usize
    }
}

/// The batch of one rank in a round.
pub(super) struct RankBatch {
    pub(super) info: BatchInfo,
    /// The numbers of its samples among the items.
    chosen: Vec<usize>,
}

impl<I: Clone> StreamRound<I> {
    /// Returns the batch of a rank; `None` if it has nothing to do any more.
    pub(super) fn hand(&self, rank: usize, pass: &StreamPass) -> Option<RankBatch> {
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

    /// The items of a hand.
    pub(super) fn items(&self, hand: &RankBatch) -> Vec<I> {
        hand.chosen.iter().map(|&i| self.items[i].clone()).collect()
    }

    /// Returns [`items`](Self::items) by value, if they are needed for nothing else.
    pub(super) fn into_items(mut self, hand: &RankBatch) -> Vec<I> {
        let is_run = hand.chosen.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        match (hand.chosen.first(), hand.chosen.last()) {
            (Some(&first), Some(&last)) if is_run => self.items.drain(first..=last).collect(),
            _ => self.items(hand),
        }
    }
}

/// This rank's batches of a stream that every rank reads as a whole.
pub(super) struct InterleavedBatches<S: SampleStream, O> {
    pass: StreamPass,
    /// The rounds; `None` before the first batch.
    rounds: Option<StreamRounds<S::Item>>,
    streamed: Streamed<S, O>,
}

impl<S: SampleStream, O> InterleavedBatches<S, O> {
    pub(super) fn new(streamed: Streamed<S, O>, pass: StreamPass) -> Self {
        Self {
            pass,
            rounds: None,
            streamed,
        }
    }
}

impl<S: SampleStream, O: 'static> InterleavedBatches<S, O> {
    fn read(&mut self) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let rounds = StreamRounds::opened(&mut self.rounds, &*self.streamed.stream, &self.pass)?;
        let Some(round) = rounds.next()? else {
            return Ok(None);
        };
        let pass = &self.pass;
        let Some(hand) = round.hand(pass.rank(), pass) else {
            return Ok(None);
        };
        let items = round.into_items(&hand);
        let indices = &hand.info.indices;
        let batching = &self.streamed.batching;
        let value = batching.batch(pass.epoch, items, indices, &pass.device);
        Ok(Some(Batch::new(value, hand.info)))
    }
}

impl<S: SampleStream, O: 'static> Iterator for InterleavedBatches<S, O> {
    type Item = Result<Batch<DeferredBatch<O>>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// This rank's batches of a stream that rank 0 reads for all.
pub(super) struct DispatchedBatches<S: SampleStream, O> {
    /// The steps that rank 0 reads, ahead of the training.
    ahead: Option<Ahead<Dispatch<O>>>,
    has_ended: bool,
    pass: StreamPass,
    /// The step of the next batch.
    step: u64,
    streamed: Streamed<S, O>,
}

/// The batches of rank 0 for one step.
struct Dispatch<O> {
    own: Batch<DeferredBatch<O>>,
    /// One message per rank; rank 0's own is not used.
    messages: Vec<DispatchMessage>,
}

/// The message of rank 0 to another rank.
#[derive(Deserialize, Serialize)]
enum DispatchMessage {
    Batch(BatchInfo, Bytes),
    End,
    Failed(Failure),
}

impl<S, O> DispatchedBatches<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: Send + 'static,
{
    pub(super) fn new(streamed: Streamed<S, O>, pass: StreamPass) -> Self {
        let ahead = (pass.rank() == 0).then(|| {
            let reader = Dispatcher {
                pass: pass.clone(),
                rounds: None,
                streamed: streamed.clone(),
            };
            read_ahead(&pass.spec, pass.timeline.clone(), reader)
        });
        Self {
            ahead,
            has_ended: false,
            step: pass.first_step(),
            pass,
            streamed,
        }
    }

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
        let (group, caller) = (&self.pass.group, self.pass.caller);
        exchange_step(
            group,
            position,
            made,
            "make its batch of the stream",
            caller,
        )?;
        batch
    }

    /// Sends what was read to the others.
    fn send(
        &self,
        position: ReadPosition,
        ahead: Option<Result<Dispatch<O>>>,
    ) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let same = |message: &dyn Fn() -> DispatchMessage| {
            (0..self.pass.world_size()).map(|_| message()).collect()
        };
        let (own, messages): (_, Vec<_>) = match ahead {
            Some(Ok(Dispatch { own, messages })) => (Ok(Some(own)), messages),
            Some(Err(error)) => {
                let messages = same(&|| DispatchMessage::Failed(Failure::of(&error)));
                (Err(error), messages)
            }
            None => (Ok(None), same(&|| DispatchMessage::End)),
        };
        let messages: Vec<_> = messages
            .into_iter()
            .map(|message| (position, message))
            .collect();
        let pass = &self.pass;
        let group = pass.group.for_purpose(PURPOSE).for_caller(pass.caller);
        let sent = group.scatter_object::<_, (ReadPosition, DispatchMessage)>(Some(&messages), 0);
        // The reader's own error is the cause.
        let own = own?;
        sent?;
        Ok(own)
    }

    fn receive(&self, position: ReadPosition) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let (pass, batching) = (&self.pass, &self.streamed.batching);
        let group = pass.group.for_purpose(PURPOSE).for_caller(pass.caller);
        let message = group
            .scatter_object::<(ReadPosition, DispatchMessage), (ReadPosition, DispatchMessage)>(
                None, 0,
            )?;
        match message {
            // Of no use here: the exchange of the step below fails.
            (sent_for, _) if sent_for != position => Ok(None),
            (_, DispatchMessage::End) => Ok(None),
            (_, DispatchMessage::Failed(failure)) => Err(failure.into_error(0, "read the stream")),
            (_, DispatchMessage::Batch(info, bytes)) => caught("making a batch", || {
                let items: Vec<S::Item> = decode(&bytes.0)?;
                let value = batching.batch(pass.epoch, items, &info.indices, &pass.device);
                Ok(Some(Batch::new(value, info)))
            }),
        }
    }
}

impl<S, O> Iterator for DispatchedBatches<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: Send + 'static,
{
    type Item = Result<Batch<DeferredBatch<O>>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let batch = self.read();
        // The last batch says that it is: no rank asks for another one.
        self.has_ended = match &batch {
            Ok(Some(batch)) => batch.is_last(),
            _ => true,
        };
        batch.transpose()
    }
}

/// Reads rounds, and packs what the others get.
struct Dispatcher<S: SampleStream, O> {
    pass: StreamPass,
    rounds: Option<StreamRounds<S::Item>>,
    streamed: Streamed<S, O>,
}

impl<S, O> Dispatcher<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: 'static,
{
    fn read(&mut self) -> Result<Option<Dispatch<O>>> {
        let rounds = StreamRounds::opened(&mut self.rounds, &*self.streamed.stream, &self.pass)?;
        let Some(round) = rounds.next()? else {
            return Ok(None);
        };
        let pass = &self.pass;
        let Some(own) = round.hand(0, pass) else {
            return Ok(None);
        };
        let mut messages = vec![DispatchMessage::End];
        for rank in 1..pass.world_size() {
            messages.push(match round.hand(rank, pass) {
                Some(hand) => {
                    let bytes = Bytes(encode(&round.items(&hand))?);
                    DispatchMessage::Batch(hand.info, bytes)
                }
                None => DispatchMessage::End,
            });
        }
        // As the others get theirs, so that what cannot travel fails on any number of ranks.
        let items: Vec<S::Item> = decode(&encode(&round.into_items(&own))?)?;
        let batching = &self.streamed.batching;
        let value = batching.batch(pass.epoch, items, &own.info.indices, &pass.device);
        Ok(Some(Dispatch {
            own: Batch::new(value, own.info),
            messages,
        }))
    }
}

impl<S, O> Iterator for Dispatcher<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: 'static,
{
    type Item = Result<Dispatch<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
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

/// Bytes that serde takes as such, and not one by one.
struct Bytes(Vec<u8>);

impl Serialize for Bytes {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<T: Deserializer<'de>>(deserializer: T) -> Result<Self, T::Error> {
        struct Buffer;

        impl Visitor<'_> for Buffer {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }

            fn visit_byte_buf<E: serde::de::Error>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
        }

        deserializer
            .deserialize_byte_buf(Buffer)
            .map_err(T::Error::custom)
    }
}
