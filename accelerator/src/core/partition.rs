//! Partitions of parameters among the ranks, for sharded optimizers and sharded units.

use core::cell::RefCell;
use core::ops::Range;
use std::collections::HashMap;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use burn::module::{ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::dyn_module::DynModule;
use super::error::{Error, Result};
use super::offload::Offload;

/// The number of elements in a block. The norm sums the squares of each block separately. Parameters are cut only between
/// blocks, so the norm is bit-identical however they are cut.
pub(crate) const BLOCK: usize = 1024;

/// A parameter is sharded only if each rank gets at least this many elements: for smaller shards, the
/// fixed cost of a shard exceeds the saving.
const WORTH_A_PIECE: usize = 4096;

/// The maximum number of bytes that rank 0 sends at once. Apart from its own pieces, no other rank holds more than this of
/// a parameter.
const CHUNK: usize = 16 << 20;

/// The ranks on which the elements of a parameter live.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Partition {
    /// Rank `r` has the elements `bounds[r]..bounds[r + 1]`.
    bounds: Vec<usize>,
    shape: Vec<usize>,
}

impl Partition {
    pub(crate) fn range(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The shape of a rank's piece: that of the parameter, if it has all of it.
    pub(crate) fn shape(&self, rank: usize) -> Vec<usize> {
        let length = self.range(rank).len();
        if length == self.elements() {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len().max(1)];
        shape[0] = length;
        shape
    }

    pub(crate) fn whole_shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn elements(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// Returns `true` if there are several ranks. The piece of a single one is the whole parameter.
    pub(crate) fn is_divided(&self) -> bool {
        self.bounds.len() > 2
    }

    /// Returns the beginning of each rank's part, and the end of the last one.
    pub(crate) fn bounds(&self) -> &[usize] {
        &self.bounds
    }
}

/// Returns the place in memory of elements of this size.
pub(crate) fn byte_range(elements: Range<usize>, width: usize) -> Range<usize> {
    elements.start * width..elements.end * width
}

/// The partitions of parameters so far.
#[derive(Debug)]
pub(crate) struct Partitioner {
    /// Identifies gradients that are cut at these partitions.
    identity: Arc<()>,
    known: HashMap<ParamId, Arc<Partition>>,
    loads: Vec<usize>,
}

impl Partitioner {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            identity: Arc::default(),
            known: HashMap::new(),
            loads: vec![0; ranks],
        }
    }

    pub(crate) fn known(&self) -> &HashMap<ParamId, Arc<Partition>> {
        &self.known
    }

    pub(crate) fn identity(&self) -> &Arc<()> {
        &self.identity
    }

    /// Returns `true` if [`settle`](Self::settle) would call `may_be_cut` for this parameter.
    pub(crate) fn asks_about(&self, id: ParamId, shape: &[usize]) -> bool {
        !self.known.contains_key(&id) && self.is_large(shape)
    }

    /// Assigns a parameter to ranks. Calls `may_be_cut` only if the parameter is large. `width` is the size of an element
    /// in bytes.
    pub(crate) fn settle(
        &mut self,
        id: ParamId,
        shape: &[usize],
        width: usize,
        may_be_cut: impl FnOnce() -> bool,
    ) -> &Arc<Partition> {
        let (ranks, elements) = (self.loads.len(), shape.iter().product::<usize>());
        let cut = self.is_large(shape) && may_be_cut();
        let bounds = if cut {
            self.in_blocks(elements, width)
        } else {
            let owner = lightest(&self.loads);
            let bound = |rank| if rank > owner { elements } else { 0 };
            (0..=ranks).map(bound).collect()
        };
        let partition = Partition {
            bounds,
            shape: shape.to_vec(),
        };
        for (rank, load) in self.loads.iter_mut().enumerate() {
            *load += partition.range(rank).len() * width;
        }
        self.known.entry(id).or_insert(Arc::new(partition))
    }

    fn is_large(&self, shape: &[usize]) -> bool {
        shape.iter().product::<usize>() >= self.loads.len() * WORTH_A_PIECE
    }

    /// Splits `elements` elements of `width` bytes at block boundaries, evenly at first. Remaining blocks go to the
    /// least loaded ranks; then blocks move from the most to the least loaded rank while their loads differ by more
    /// than a block, which can happen because the last block of each parameter may be short.
    fn in_blocks(&self, elements: usize, width: usize) -> Vec<usize> {
        let (blocks, ranks) = (elements.div_ceil(BLOCK), self.loads.len());
        let (share, block) = (blocks / ranks, BLOCK * width);
        let mut shares = vec![share; ranks];
        let mut loads: Vec<_> = self.loads.iter().map(|load| load + share * block).collect();
        loads[ranks - 1] -= blocks * block - elements * width;
        for _ in 0..blocks % ranks {
            let least = lightest(&loads);
            shares[least] += 1;
            loads[least] += block;
        }
        loop {
            let (least, most) = (lightest(&loads), heaviest(&loads));
            if loads[most] - loads[least] <= block || shares[most] == 1 {
                break;
            }
            shares[most] -= 1;
            loads[most] -= block;
            shares[least] += 1;
            loads[least] += block;
        }
        let mut reached = 0;
        let ends = shares.into_iter().map(|share| {
            reached += share * BLOCK;
            reached.min(elements)
        });
        core::iter::once(0).chain(ends).collect()
    }
}

/// Returns the least loaded rank; the first of them on a tie.
fn lightest(loads: &[usize]) -> usize {
    let loads = loads.iter().enumerate();
    loads.min_by_key(|(_, load)| **load).map_or(0, |(at, _)| at)
}

/// Returns the most loaded rank; the last of them on a tie.
fn heaviest(loads: &[usize]) -> usize {
    let loads = loads.iter().enumerate();
    loads.max_by_key(|(_, load)| **load).map_or(0, |(at, _)| at)
}

/// The piece of a parameter that a rank holds.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Piece {
    pub(crate) partition: Arc<Partition>,
    rank: usize,
    /// The offload folder for its values, if offloading is on.
    pub(crate) offload: Option<Offload>,
}

impl Piece {
    pub(crate) fn new(partition: Arc<Partition>, rank: usize) -> Self {
        Self {
            partition,
            rank,
            offload: None,
        }
    }

    /// Sets the offload folder for the piece's values.
    pub(crate) fn offloaded(mut self, offload: Option<&Offload>) -> Self {
        self.offload = offload.cloned();
        self
    }

    /// Returns its elements within the parameter.
    pub(crate) fn range(&self) -> Range<usize> {
        self.partition.range(self.rank)
    }

    /// Returns its shape.
    pub(crate) fn shape(&self) -> Vec<usize> {
        self.partition.shape(self.rank)
    }

    /// Gives each rank its piece of the bytes that rank 0 passes, or of zeros if it passes none. `width` is the size of an
    /// element in bytes. All ranks call it. If rank 0 passes another number of bytes, it takes part and fails.
    #[track_caller]
    pub(crate) fn scatter(
        &self,
        group: &ProcessGroup,
        width: usize,
        whole: Option<&[u8]>,
    ) -> Result<Vec<u8>> {
        self.scatter_in_chunks(group, width, whole, CHUNK)
    }

    #[track_caller]
    fn scatter_in_chunks(
        &self,
        group: &ProcessGroup,
        width: usize,
        whole: Option<&[u8]>,
        size: usize,
    ) -> Result<Vec<u8>> {
        self.check_group(group)?;
        let piece = byte_range(self.range(), width);
        let end = self.partition.elements() * width;
        let fits = whole.is_none_or(|whole| whole.len() == end);
        let whole = whole.filter(|_| fits);
        let (mut own, mut chunk) = (Vec::with_capacity(piece.len()), Vec::new());
        for start in (0..end).step_by(size) {
            let sent = start..(start + size).min(end);
            chunk.clear();
            match whole {
                Some(whole) => chunk.extend_from_slice(&whole[sent.clone()]),
                None => chunk.resize(sent.len(), 0),
            }
            group.broadcast(&mut chunk, 0)?;
            let at = |place: usize| place.clamp(sent.start, sent.end) - start;
            own.extend_from_slice(&chunk[at(piece.start)..at(piece.end)]);
        }
        match fits {
            true => Ok(own),
            false => Err(Error::model(
                "the values of a sharded parameter do not have the size of the parameter",
            )),
        }
    }

    /// Joins the pieces of all ranks. Returns the whole parameter on the ranks that keep it, and nothing on others. All
    /// ranks call it. If this rank's piece has another size, it takes part and fails.
    #[track_caller]
    pub(crate) fn gather(
        &self,
        group: &ProcessGroup,
        width: usize,
        own: &[u8],
        kept_by: KeptBy,
    ) -> Result<Vec<u8>> {
        self.check_group(group)?;
        let is_kept = kept_by == KeptBy::All || group.rank() == 0;
        let bounds = self.partition.bounds();
        let length = self.partition.elements() * width;
        let mut whole = vec![0; if is_kept { length } else { 0 }];
        let mut reached: Vec<_> = bounds.iter().map(|bound| bound * width).collect();
        let mut write = |rank: usize, bytes: &[u8]| {
            if is_kept {
                let start = reached[rank];
                whole[start..start + bytes.len()].copy_from_slice(bytes);
                reached[rank] += bytes.len();
            }
        };
        let expected = self.range().len() * width;
        let fits = own.len() == expected;
        let replaced = if fits { Vec::new() } else { vec![0; expected] };
        let own = if fits { own } else { &replaced };
        write(group.rank(), own);
        group.all_gather_varied_with(own, &mut write)?;
        match fits {
            true => Ok(whole),
            false => Err(replaced_piece()),
        }
    }

    /// Fails if the ranks among which the parameter is divided are not those of this group.
    fn check_group(&self, group: &ProcessGroup) -> Result<()> {
        let ranks = self.partition.bounds().len() - 1;
        if (ranks, self.rank) == (group.world_size(), group.rank()) {
            return Ok(());
        }
        Err(Error::misuse(format!(
            "the units of a model are sharded over {ranks} ranks of another accelerator, and this one, of {} ranks, has only \
             some of the pieces: save the model with the accelerator that prepared it, and load the file",
            group.world_size()
        )))
    }

    /// Replaces the values of this piece in a parameter of a model.
    pub(crate) fn write<const D: usize>(
        &self,
        param: Param<Tensor<D>>,
        bytes: Vec<u8>,
    ) -> Param<Tensor<D>> {
        let (id, old, mapper) = param.consume();
        let new = self.tensor(bytes, old.dtype(), &old.device());
        Param::from_mapped_value(id, new.set_require_grad(old.is_require_grad()), mapper)
    }

    /// Returns a tensor with these values of the piece.
    pub(crate) fn tensor<const D: usize>(
        &self,
        bytes: Vec<u8>,
        dtype: DType,
        device: &Device,
    ) -> Tensor<D> {
        let data = TensorData::from_bytes_vec(bytes, self.shape(), dtype);
        let data = match &self.offload {
            Some(offload) => offload.moved(data),
            None => data,
        };
        Tensor::from_data(data, (device, dtype))
    }
}

/// The ranks that keep what all ranks gather.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum KeptBy {
    All,
    Main,
}

/// The error if a piece has another size than this rank's part of the parameter.
pub(crate) fn replaced_piece() -> Error {
    Error::misuse(
        "a parameter of a sharded unit was replaced by a tensor that does not have the size of this rank's piece: load values \
         with `load_model` or `resume`",
    )
}

/// The partitions of a sharded unit's parameters. Each rank holds one piece of each of them.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    pub(crate) rank: usize,
    pub(crate) partitions: HashMap<ParamId, Arc<Partition>>,
    /// The offload folder for the values and gradients of this rank's pieces, if offloading is on.
    pub(crate) offload: Option<Offload>,
}

impl Pieces {
    /// Returns `true` if there are several ranks. The pieces of a single one are whole parameters.
    pub(crate) fn are_divided(&self) -> bool {
        let mut partitions = self.partitions.values();
        partitions.any(|partition| partition.is_divided())
    }

    /// Moves values or gradients of this rank's pieces to a file if offloading is on.
    pub(crate) fn in_file(&self, data: TensorData) -> TensorData {
        match &self.offload {
            Some(offload) => offload.moved(data),
            None => data,
        }
    }

    /// Runs `visit`, in which [`piece_of`] finds the pieces of this unit.
    pub(crate) fn show<T>(self: &Arc<Self>, visit: impl FnOnce() -> T) -> T {
        self.shown(visit).0
    }

    /// Runs `map`, in which [`piece_of`] finds the pieces of this unit and [`give_id`] gives their parameters other ids.
    /// Returns the pieces by the ids that they have afterwards.
    pub(crate) fn map<T>(self: &Arc<Self>, map: impl FnOnce() -> T) -> (T, Arc<Self>) {
        let (mapped, renamed) = self.shown(map);
        if renamed.is_empty() {
            return (mapped, self.clone());
        }
        let partitions = self.partitions.iter().map(|(id, partition)| {
            let id = renamed.get(id).copied().unwrap_or(*id);
            (id, partition.clone())
        });
        let pieces = Self {
            rank: self.rank,
            partitions: partitions.collect(),
            offload: self.offload.clone(),
        };
        (mapped, Arc::new(pieces))
    }

    fn shown<T>(self: &Arc<Self>, visit: impl FnOnce() -> T) -> (T, HashMap<ParamId, ParamId>) {
        struct Before(Option<Shown>);
        impl Drop for Before {
            fn drop(&mut self) {
                SHOWN.set(self.0.take());
            }
        }
        let shown = Shown {
            pieces: self.clone(),
            renamed: HashMap::new(),
        };
        let _before = Before(SHOWN.replace(Some(shown)));
        let visited = visit();
        let renamed = SHOWN.take().map(|shown| shown.renamed);
        (visited, renamed.unwrap_or_default())
    }
}

/// If the model that is being visited holds only a piece of the parameter, returns it. The visitor sees the piece.
pub(crate) fn piece_of(id: ParamId) -> Option<Piece> {
    SHOWN.with_borrow(|shown| {
        let pieces = &shown.as_ref()?.pieces;
        let partition = pieces.partitions.get(&id)?.clone();
        Some(Piece::new(partition, pieces.rank).offloaded(pieces.offload.as_ref()))
    })
}

/// Gives a parameter of the model that is being mapped another id.
pub(crate) fn give_id<T: Parameter>(param: &mut Param<T>, id: ParamId) {
    if param.id != id && piece_of(param.id).is_some() {
        SHOWN.with_borrow_mut(|shown| {
            if let Some(shown) = shown {
                shown.renamed.insert(param.id, id);
            }
        });
    }
    param.id = id;
}

/// Returns `true` if a model holds only pieces of some parameters.
pub(crate) fn is_sharded(model: &dyn DynModule) -> bool {
    struct Search(bool);
    impl ModuleVisitor for Search {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= piece_of(param.id).is_some_and(|piece| piece.partition.is_divided());
        }
    }
    let mut search = Search(false);
    model.visit(&mut search);
    search.0
}

/// The sharded unit that is being visited.
struct Shown {
    pieces: Arc<Pieces>,
    /// The new ids of parameters.
    renamed: HashMap<ParamId, ParamId>,
}

thread_local! {
    /// A visitor sees only parameters, so units show their pieces here.
    static SHOWN: RefCell<Option<Shown>> = const { RefCell::new(None) };
}

#[cfg(test)]
mod tests {
    use accelerator_collective::GroupOptions;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn homes_cover_every_element_once_and_are_balanced(
            sizes in proptest::collection::vec(0_usize..60_000, 1..30),
            ranks in 2_usize..6,
        ) {
            let mut partitions = Partitioner::new(ranks);
            for &size in &sizes {
                let partition = partitions.settle(ParamId::new(), &[size], 4, || true).clone();
                let mut covered = 0;
                for rank in 0..ranks {
                    prop_assert_eq!(partition.range(rank).start, covered);
                    prop_assert_eq!(
                        partition.shape(rank).iter().product::<usize>(),
                        partition.range(rank).len()
                    );
                    if !partition.range(rank).is_empty() {
                        prop_assert_eq!(partition.range(rank).start % BLOCK, 0);
                    }
                    covered = partition.range(rank).end;
                }
                prop_assert_eq!(covered, size);
            }
            let most = partitions.loads.iter().max().unwrap();
            let least = partitions.loads.iter().min().unwrap();
            // One parameter that is not cut, and a block of one that is.
            let slack = 4 * (ranks * WORTH_A_PIECE + BLOCK);
            prop_assert!(most - least <= slack, "{:?}", partitions.loads);
        }
    }

    proptest! {
        #[test]
        fn pieces_are_scattered_and_joined(
            sizes in proptest::collection::vec(0_usize..5, 1..4),
            width in 1_usize..9,
            chunk in 1_usize..12,
        ) {
            let ends = sizes.iter().scan(0, |end, size| {
                *end += size;
                Some(*end)
            });
            let bounds: Vec<usize> = core::iter::once(0).chain(ends).collect();
            let elements = bounds[sizes.len()];
            let partition = Arc::new(Partition { bounds, shape: vec![elements] });
            let whole: Vec<u8> = (1..).take(elements * width).collect();
            let ranks = ProcessGroup::threads(sizes.len(), &GroupOptions::new()).unwrap();
            std::thread::scope(|scope| {
                for group in ranks {
                    let (whole, piece) = (&whole, Piece::new(partition.clone(), group.rank()));
                    scope.spawn(move || {
                        let sent = (group.rank() == 0).then_some(&**whole);
                        let own = piece.scatter_in_chunks(&group, width, sent, chunk).unwrap();
                        assert_eq!(own, whole[byte_range(piece.range(), width)]);
                        let joined = piece.gather(&group, width, &own, KeptBy::Main).unwrap();
                        let expected = if group.rank() == 0 { &**whole } else { &[] };
                        assert_eq!(joined, expected);
                        let joined = piece.gather(&group, width, &own, KeptBy::All).unwrap();
                        assert_eq!(joined, *whole);
                        let misfit = [0].repeat(own.len() + usize::from(group.rank() == 0));
                        let joined = piece.gather(&group, width, &misfit, KeptBy::All);
                        assert_eq!(joined.is_err(), group.rank() == 0);
                        group.barrier().unwrap();
                    });
                }
            });
        }
    }

    #[test]
    fn a_piece_of_another_group_is_refused() {
        let mut partitions = Partitioner::new(2);
        let partition = partitions.settle(ParamId::new(), &[8], 4, || false);
        let group = ProcessGroup::threads(1, &GroupOptions::new())
            .unwrap()
            .remove(0);
        for rank in 0..2 {
            let piece = Piece::new(partition.clone(), rank);
            let joined = piece.gather(&group, 4, &[0; 32], KeptBy::Main);
            assert!(joined.unwrap_err().is_misuse());
            assert!(piece.scatter(&group, 4, None).unwrap_err().is_misuse());
        }
    }

    #[test]
    fn what_may_not_be_cut_lives_on_one_rank() {
        let mut partitions = Partitioner::new(2);
        for owner in [0, 1] {
            let partition = partitions.settle(ParamId::new(), &[100_000], 4, || false);
            assert_eq!(partition.range(owner), 0..100_000);
            assert_eq!(partition.shape(owner), [100_000]);
        }
    }
}
