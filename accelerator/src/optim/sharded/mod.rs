//! Optimizers whose state is sharded over the ranks.

mod elements;
pub(super) mod param_shards;
mod pieces;
mod records;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::Bytes;

use self::elements::Elements;
use self::param_shards::{ShardGradients, ShardReader};
pub(super) use self::pieces::PieceState;
pub(crate) use self::pieces::{RankRecord, WholeState};
use self::records::{RecordEntry, Records};
use super::fused::step::{self, StepOutput};
use super::unsharded::FusedSupport;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};
use crate::core::offload::Scratch;
use crate::core::partition::{Partition, Partitioner, Piece};
use crate::core::tensor::register;
use crate::model::Trainable;
use crate::optim::record_io::{bytes_of, check_types, load, window};
use crate::reduce::{GradientSums, ShardMap};

/// An optimizer whose state is sharded over the ranks: prepare `Sharded(optimizer)` instead of `optimizer`, with or
/// without a scheduler.
///
/// Each rank keeps its part of the state, steps its part of the parameters, and gets the rest from the
/// others (ZeRO stage 1): time and memory of the optimizer are divided by the number of ranks, and a step
/// ends with an all-gather of the parameters. Gradients are reduced to the part that a rank steps, from the
/// second step on: so a step sends what it would send without, and the norm is added up over the ranks if it is
/// asked for ([`AveragedGradients::norm`](crate::AveragedGradients::norm)). Training has the same bits as without, on the CPU. One
/// rank alone has nothing to share.
///
/// ```
/// use accelerator::prelude::*;
/// use accelerator::optim::{InitFused, Sharded};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::Tensor;
///
/// let train = |ranks| {
///     accelerator::launch(ranks, |accelerator| {
///         let device = accelerator.device();
///         let model: Linear = accelerator.init(|device| LinearConfig::new(300, 70).init(device));
///         let optimizer = AdamWConfig::new().init_fused();
///         let (mut model, mut optimizer) = accelerator.prepare((model, Sharded(optimizer)))?;
///         for _ in 0..3 {
///             let input = Tensor::<2>::ones([2, 300], &device);
///             let loss = model.forward(input).powi_scalar(2).mean();
///             let gradients = accelerator.backward(loss, &model, 2)?;
///             model = optimizer.step(1e-3, model, gradients);
///         }
///         Ok((model.weight.val().into_data(), optimizer.state_memory()?))
///     })
/// };
/// let (alone, together) = (train(1)?, train(2)?);
/// assert_eq!(together[0].0, alone[0].0, "bit for bit");
/// assert!(together[0].1 < alone[0].1 * 6 / 10, "half of the state");
/// # Ok::<(), Error>(())
/// ```
///
/// Every optimizer of Burn's can be sharded. One that looks at a parameter as a whole (LAMB, Muon,
/// Adafactor; gradient clipping that is set in Burn's configuration) keeps each parameter on one rank;
/// the others, which look at each element by itself, cut large parameters. Which kind an optimizer is
/// shows when a parameter is first stepped, by stepping a small tensor in both ways: an optimizer of your
/// own that is element-wise there, and not everywhere, must not be sharded.
///
/// In a checkpoint the state is whole: training continues at another number of ranks, and with or without
/// sharding. While ranks step they are joined by the all-gather; when another rank is lost in it, the
/// model is as it was, [`outcome`](super::PreparedOptimizer::outcome) is
/// [`Lost`](super::StepOutcome::Lost), and the next call that communicates returns the error. An
/// emergency checkpoint cannot hold a sharded optimizer, since the lost rank's state is gone.
#[derive(Clone, Copy, Debug)]
pub struct Sharded<O>(
    /// Burn's optimizer.
    pub O,
);

/// The state of a sharded optimizer beside Burn's, which holds the state of this rank's pieces.
pub(crate) struct Shards {
    blank: ModuleOptimizer,
    group: ProcessGroup,
    partitions: Partitioner,
    kinds: FusedSupport,
    /// State of whole parameters that were not stepped since it was loaded.
    loaded: Records,
}

/// The state of all ranks at one moment.
pub(super) struct FullState {
    partitions: HashMap<ParamId, Arc<Partition>>,
    /// The state of other parameters.
    others: OtherState,
    loaded: Records,
    /// The part of each rank, once they came together on rank 0.
    parts: Vec<Bytes>,
}

/// The state of parameters that are not cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum OtherState {
    /// There is none.
    Unexpected,
    /// The same on all ranks.
    Replicated,
}

impl Shards {
    /// Takes what state the optimizer has, to be cut later. `None` if there is one rank alone.
    pub(crate) fn new(
        group: &ProcessGroup,
        optimizer: ModuleOptimizer,
    ) -> Result<(ModuleOptimizer, Option<Self>)> {
        if group.world_size() == 1 {
            return Ok((optimizer, None));
        }
        let loaded = Records::of(&optimizer)?;
        let blank = optimizer.load_record(OptimizerRecord::default());
        let shards = Self {
            blank: blank.clone(),
            group: group.clone(),
            partitions: Partitioner::new(group.world_size()),
            kinds: FusedSupport::default(),
            loaded,
        };
        Ok((blank, Some(shards)))
    }

    /// Continues from a record of whole parameters, which fits the optimizer. Gives the optimizer
    /// without state.
    pub(super) fn resume_from(&mut self, record: Bytes) -> Result<ModuleOptimizer> {
        self.loaded = Records::read(record)?;
        self.partitions = Partitioner::new(self.group.world_size());
        Ok(self.blank.clone())
    }

    /// The optimizer, as if it had all the state in a record; to compare with what it would save.
    pub(super) fn blank(&self) -> ModuleOptimizer {
        self.blank.clone()
    }

    /// The bytes of state that wait to be cut.
    pub(super) fn waiting(&self) -> usize {
        self.loaded.size()
    }

    pub(super) fn full_state(&self) -> FullState {
        FullState {
            partitions: self.partitions.known().clone(),
            others: OtherState::Unexpected,
            loaded: self.loaded.clone(),
            parts: Vec::new(),
        }
    }

    /// Ends the group over gradients of another accelerator: other ranks may have none.
    pub(super) fn refuse_foreign(&self) {
        self.group.abort(format!(
            "a sharded optimizer of {} ranks got gradients of another accelerator, which has another number of \
             ranks: let `backward` of the accelerator that prepared the optimizer make them",
            self.group.world_size()
        ));
    }

    /// Steps this rank's pieces and gives the model all ranks' new values. If other ranks are lost,
    /// the model is as it was, in `Err`; the group has failed then.
    #[track_caller]
    pub(super) fn step(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        model: BoxedModule,
        mut sums: GradientSums,
    ) -> core::result::Result<BoxedModule, BoxedModule> {
        if sums.ranks() != self.group.world_size() {
            self.refuse_foreign();
            return Err(model);
        }
        let rank = self.group.rank();
        sums.move_to_host(&self.group);
        let bounds = match self.settle(optimizer, &mut sums) {
            Ok(bounds) => bounds,
            Err(error) => {
                self.group.abort(error.to_string());
                return Err(model);
            }
        };
        self.kinds.learn(&self.blank, &sums);
        let averaged = sums.parameters().map(|known| known.id).collect();
        let mut reader = ShardReader::new(rank, self.partitions.known(), averaged);
        model.visit(&mut reader);
        let (mut shards, stepped) = reader.finish();
        let mut gradients = GradientsParams::new();
        for shard in shards.iter_mut() {
            let gradient = if self.kinds.is_fused(shard.id) {
                shard.sums = ShardGradients::Waiting;
                sums.stand_in(shard.id)
            } else {
                sums.part(shard.id, &shard.range, &shard.shape)
            };
            if let Some(gradient) = gradient {
                register(&mut gradients, shard.id, gradient);
            }
        }
        let step = || optimizer.step(rate, shards, gradients);
        let (shards, mut sums) = step::step_on(sums, StepOutput::Sums, step);
        for shard in shards.into_elsewhere() {
            let (id, range) = (shard.id, shard.range.clone());
            sums.write(id, &range, &shard.into_bytes());
        }
        let model = self.exchange(model, &mut sums, stepped)?;
        if let Some(bounds) = bounds
            && let Err(error) = sums.shard_next(&bounds)
        {
            // Other ranks cut the next window.
            self.group.abort(error.to_string());
        }
        Ok(model)
    }

    /// Gives the model all ranks' new pieces, which lie in the places of their sums.
    #[track_caller]
    fn exchange(
        &self,
        model: BoxedModule,
        sums: &mut GradientSums,
        stepped: HashSet<ParamId>,
    ) -> core::result::Result<BoxedModule, BoxedModule> {
        let partitions = self.partitions.known();
        let part = |id: ParamId, rank| match partitions.get(&id) {
            Some(partition) if stepped.contains(&id) => partition.range(rank),
            _ => 0..0,
        };
        let mut elements = Elements::default();
        let model = model.map(&mut elements.taker(stepped.clone()));
        let mut all_there = false;
        let gathered = sums.exchange(&self.group, part, |id, start, bytes| {
            all_there = true;
            elements.write(id, start, bytes);
        });
        let model = model.map(&mut elements);
        match gathered {
            Err(error) if !all_there => {
                // Others wait for a rank that refuses by itself.
                self.group.abort(error.to_string());
                Err(model)
            }
            // All is written, also where a rank was lost after that.
            _ => Ok(model),
        }
    }

    /// Settles where the parameters live of a model that is stepped for the first time, and cuts what state
    /// was loaded for them. Gives where its gradients are to be cut, unless they are already.
    ///
    /// Gradients that are cut for another optimizer are made whole.
    #[track_caller]
    fn settle(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        sums: &mut GradientSums,
    ) -> Result<Option<Arc<ShardMap>>> {
        if sums.bounds().is_some_and(|bounds| !self.are_mine(bounds)) {
            sums.make_whole()?;
        }
        let next = sums.next_bounds();
        if next.is_some_and(|bounds| self.are_mine(&bounds)) {
            return Ok(None);
        }
        let (mut partitions, mut cut) = (Vec::new(), Records::default());
        let mut told = self.judge(sums)?.into_iter();
        for parameter in sums.all_parameters() {
            if let Some(partition) = self.partitions.known().get(&parameter.id) {
                partitions.push(partition.clone());
                continue;
            }
            let partition = self.partitions.settle(
                parameter.id,
                &parameter.shape,
                parameter.float.width(),
                || told.next().unwrap_or(false),
            );
            partitions.push(partition.clone());
            if let Some(entry) = self.loaded.0.remove(&parameter.id)
                && let Some(entry) = entry.cut(&Piece::new(partition.clone(), self.group.rank()))
            {
                cut.0.insert(parameter.id, entry);
            }
        }
        if !cut.0.is_empty() {
            let mut all = Records::of(optimizer)?;
            all.0.extend(cut.0);
            let blank = self.blank.clone();
            let loaded = load("a sharded optimizer", blank, all.into_bytes()?)?;
            let parameters = sums.all_parameters();
            let known = |id| parameters.iter().find(|known| known.id == id).cloned();
            check_types(&loaded, known, sums.device())?;
            *optimizer = loaded;
        }
        Ok(sums.can_shard().then(|| {
            let bounds = partitions
                .iter()
                .map(|partition| partition.bounds().to_vec());
            let ranks = self.group.world_size();
            Arc::new(ShardMap::new(
                bounds.collect(),
                ranks,
                self.partitions.identity(),
            ))
        }))
    }

    /// Returns `true` if this optimizer has defined these bounds.
    fn are_mine(&self, bounds: &ShardMap) -> bool {
        bounds.are_of(self.partitions.identity())
    }

    /// Tells which of the large parameters that are settled next are stepped element by element. Rank 0 decides: the
    /// processors of other hosts may round otherwise.
    #[track_caller]
    fn judge(&self, sums: &GradientSums) -> Result<Vec<bool>> {
        let parameters = sums.all_parameters().iter();
        let large: Vec<_> = parameters
            .filter(|parameter| self.partitions.asks_about(parameter.id, &parameter.shape))
            .collect();
        if large.is_empty() {
            return Ok(Vec::new());
        }
        let judged = (self.group.rank() == 0).then(|| {
            let judge = |&parameter: &&Trainable| {
                param_shards::is_element_wise(&self.blank, parameter, sums.device())
            };
            large.iter().map(judge).collect::<Vec<_>>()
        });
        let telling = self.group.for_purpose("shard an optimizer");
        Ok(telling.broadcast_object(judged.as_ref(), 0)?)
    }
}

impl FullState {
    /// The state of an optimizer of a model that holds pieces of these parameters.
    pub(super) fn of_pieces(partitions: HashMap<ParamId, Arc<Partition>>) -> Self {
        Self {
            partitions,
            others: OtherState::Replicated,
            loaded: Records::default(),
            parts: Vec::new(),
        }
    }

    /// Returns this rank's part of the state. Rank 0 returns the state that is replicated on all ranks.
    fn own(&self, group: &ProcessGroup, optimizer: &ModuleOptimizer) -> Result<Bytes> {
        if self.others == OtherState::Unexpected || group.rank() == 0 {
            return bytes_of(optimizer);
        }
        let mut records = Records::of(optimizer)?;
        records.0.retain(|id, _| self.partitions.contains_key(id));
        records.into_bytes()
    }

    /// Brings the state of all ranks together on rank 0. If one rank cannot write its own, all fail.
    #[track_caller]
    pub(super) fn gather(
        &mut self,
        group: &ProcessGroup,
        optimizer: &ModuleOptimizer,
    ) -> Result<()> {
        // A rank without its state still takes part, or the others would wait for it.
        let own = self.own(group, optimizer);
        let mine = own.as_ref().map(|own| own.len() as u64).ok();
        let lengths = group.all_gather_object(&mine)?;
        let own = own?;
        if let Some(rank) = lengths.iter().position(Option::is_none) {
            return Err(Error::checkpoint(format!(
                "rank {rank} could not write its part of the state of a sharded optimizer; its own \
                     error says why"
            )));
        }
        let is_main = group.rank() == 0;
        let reserved = |(rank, length): (usize, &Option<u64>)| match length {
            Some(length) if is_main && rank > 0 => (Scratch::zeroed(*length as usize), 0),
            _ => (Scratch::zeroed(0), 0),
        };
        let mut parts: Vec<_> = lengths.iter().enumerate().map(reserved).collect();
        group.all_gather_varied_with(&own, |rank, shard: &[u8]| {
            // Rank 0 already has its own part.
            if is_main && rank > 0 {
                let (part, reached) = &mut parts[rank];
                part.as_mut()[*reached..*reached + shard.len()].copy_from_slice(shard);
                *reached += shard.len();
            }
        })?;
        if is_main {
            let others = parts.into_iter().skip(1);
            let others = others.map(|(part, _)| part.into_bytes().shared());
            self.parts = core::iter::once(own).chain(others).collect();
        }
        Ok(())
    }

    /// The record of whole parameters, on rank 0.
    pub(super) fn bytes(&self) -> Result<Bytes> {
        let mut ranks = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            ranks.push(Records::read(window(part)?)?);
        }
        let mut shards: BTreeMap<ParamId, Vec<Option<RecordEntry>>> = BTreeMap::new();
        let count = ranks.len();
        for (rank, records) in ranks.into_iter().enumerate() {
            for (id, entry) in records.0 {
                let all = shards
                    .entry(id)
                    .or_insert_with(|| core::iter::repeat_with(|| None).take(count).collect());
                all[rank] = Some(entry);
            }
        }
        let mut whole = self.loaded.clone();
        for (id, entries) in shards {
            let entry = match (self.partitions.get(&id), self.others) {
                (Some(partition), _) => RecordEntry::join(entries, partition),
                (None, OtherState::Replicated) => entries.into_iter().next().flatten(),
                (None, OtherState::Unexpected) => None,
            };
            let entry = entry.ok_or_else(|| {
                Error::checkpoint(format!(
                    "expected a part of the state of parameter {id} from every rank that has \
                         elements of it, all with the same tensors; found others, so the optimizer \
                         cannot be sharded: save it unsharded"
                ))
            })?;
            whole.0.insert(id, entry);
        }
        whole.into_bytes()
    }
}
