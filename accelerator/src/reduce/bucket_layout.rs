use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{DType, ProcessGroup};

use super::overlap::ReadyOrder;
use crate::core::error::Result;
use crate::core::offload::Offload;
use crate::model::{Float, Trainable};

/// The size in bytes that is worth an all-reduce of its own: the first bucket holds no more, so that communication
/// starts soon, and no bucket that holds less is sent without a gradient that is ready later.
const WORTHWHILE: usize = 1 << 20;

/// The place of each parameter's gradient.
#[derive(Clone, Debug)]
pub(super) struct BucketLayout {
    /// Buckets of pieces are the last.
    buckets: Vec<BucketShape>,
    /// The elements that each rank gets the sums of; `None` if all ranks get all.
    cuts: Option<Arc<BucketShards>>,
    places: Vec<BucketRange>,
}

#[derive(Clone, Debug, PartialEq)]
struct BucketShape {
    dtype: DType,
    /// Set for gradients of pieces of parameters. Backward has summed these over the ranks.
    is_of_pieces: bool,
    /// The offload folder for these gradients, if offloading is on.
    offload: Option<Offload>,
    length: usize,
    /// The parameters whose gradients lie there, one after the other.
    members: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct BucketRange {
    pub(super) bucket: usize,
    pub(super) range: Range<usize>,
}

impl BucketLayout {
    /// Lays `parameters` out in that order, a bucket a dtype, each at most `size` bytes unless one
    /// parameter alone is larger. A bucket that is worth an operation does not wait for a gradient
    /// that is ready later. A bucket comes before those that are full later.
    pub(super) fn new(parameters: &[Trainable], order: &ReadyOrder, size: usize) -> Self {
        let mut buckets: Vec<BucketShape> = Vec::new();
        // The bucket that is being filled, for each dtype. All pieces of a dtype share one bucket: it is not sent, so its
        // size does not matter, and all ranks get the same number of buckets although their pieces differ in size.
        let (mut open, mut pieces) = ([None; 2], [None; 2]);
        for (position, &index) in order.parameters.iter().enumerate() {
            if position == order.early {
                open = [None; 2];
            } else if order.is_later(position) {
                let size = |&bucket: &usize| {
                    let BucketShape { dtype, length, .. } = &buckets[bucket];
                    length * width(*dtype)
                };
                open = open.map(|open| open.filter(|bucket| size(bucket) < WORTHWHILE));
            }
            let parameter = &parameters[index];
            let dtype = dtype_of(parameter.float);
            let length: usize = parameter.shape.iter().product();
            let piece = parameter.piece.as_ref();
            let is_of_pieces = piece.is_some_and(|piece| piece.partition.is_divided());
            let open = match is_of_pieces {
                true => &mut pieces,
                false => &mut open,
            };
            let open = &mut open[usize::from(dtype == DType::F64)];
            let limit = |bucket| match bucket {
                _ if is_of_pieces => usize::MAX,
                0 => size.min(WORTHWHILE),
                _ => size,
            };
            let bucket = open
                .filter(|&bucket: &usize| {
                    (buckets[bucket].length + length) * width(dtype) <= limit(bucket)
                })
                .unwrap_or_else(|| {
                    buckets.push(BucketShape {
                        dtype,
                        is_of_pieces,
                        offload: piece.and_then(|piece| piece.offload.clone()),
                        length: 0,
                        members: Vec::new(),
                    });
                    buckets.len() - 1
                });
            *open = Some(bucket);
            buckets[bucket].length += length;
            buckets[bucket].members.push(index);
        }
        let mut position = vec![0; parameters.len()];
        for (at, &index) in order.parameters.iter().enumerate() {
            position[index] = at;
        }
        buckets.sort_by_key(|bucket| {
            let last = bucket.members.last().map(|&last| position[last]);
            (bucket.is_of_pieces, last)
        });
        let nowhere = BucketRange {
            bucket: 0,
            range: 0..0,
        };
        let mut places = vec![nowhere; parameters.len()];
        for (number, bucket) in buckets.iter().enumerate() {
            let mut start = 0;
            for &index in &bucket.members {
                let end = start + parameters[index].shape.iter().product::<usize>();
                places[index] = BucketRange {
                    bucket: number,
                    range: start..end,
                };
                start = end;
            }
        }
        Self {
            buckets,
            cuts: None,
            places,
        }
    }

    /// The same places, of whose sums each rank gets what lies within its bounds.
    pub(super) fn cut_at(&self, bounds: &Arc<ShardMap>) -> Result<Self> {
        let cut = |(number, bucket): (usize, &BucketShape)| {
            let ranges = |rank| {
                let places = self.members(number).iter().map(|&index| {
                    let (start, range) =
                        (self.places[index].range.start, bounds.range(index, rank));
                    start + range.start..start + range.end
                });
                places.collect()
            };
            let parts = (0..bounds.ranks()).map(ranges).collect();
            Ok(Arc::new(ShardLayout::new(bucket.length, parts)?))
        };
        let cuts = self.buckets.iter().enumerate().map(cut);
        Ok(Self {
            cuts: Some(Arc::new(BucketShards {
                bounds: bounds.clone(),
                buckets: cuts.collect::<Result<_>>()?,
            })),
            ..self.clone()
        })
    }

    /// The same places, of which every rank gets all sums.
    pub(super) fn uncut(&self) -> Self {
        Self {
            cuts: None,
            ..self.clone()
        }
    }

    /// Returns how sums are shared out, if not every rank gets all.
    pub(super) fn cuts(&self) -> Option<&Arc<BucketShards>> {
        self.cuts.as_ref()
    }

    /// Returns `true` for a bucket with gradients of pieces of parameters, which are sums over the ranks already.
    pub(super) fn is_of_pieces(&self, bucket: usize) -> bool {
        self.buckets[bucket].is_of_pieces
    }

    /// Returns the offload folder of a bucket, or `None` if the bucket is in memory.
    pub(super) fn offload(&self, bucket: usize) -> Option<&Offload> {
        self.buckets[bucket].offload.as_ref()
    }

    /// Returns `true` if this rank holds only pieces of some parameters.
    pub(super) fn has_pieces(&self) -> bool {
        self.buckets.iter().any(|bucket| bucket.is_of_pieces)
    }

    pub(super) fn is_placed_as(&self, other: &Self) -> bool {
        self.buckets == other.buckets && self.places == other.places
    }

    pub(super) fn len(&self) -> usize {
        self.buckets.len()
    }

    pub(super) fn place(&self, parameter: usize) -> &BucketRange {
        &self.places[parameter]
    }

    /// The parameters of a bucket, by number.
    pub(super) fn members(&self, bucket: usize) -> &[usize] {
        &self.buckets[bucket].members
    }

    /// Returns the size of a bucket in bytes.
    pub(super) fn bytes(&self, bucket: usize) -> usize {
        let (dtype, length) = self.shape(bucket);
        length * width(dtype)
    }

    pub(super) fn width(&self, bucket: usize) -> usize {
        width(self.buckets[bucket].dtype)
    }

    pub(super) fn shape(&self, bucket: usize) -> (DType, usize) {
        (self.buckets[bucket].dtype, self.buckets[bucket].length)
    }
}

fn dtype_of(float: Float) -> DType {
    match float {
        Float::F64 => DType::F64,
        Float::Bf16 | Float::F16 | Float::F32 => DType::F32,
    }
}

fn width(dtype: DType) -> usize {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// The elements of each parameter that each rank steps, by number of the parameter. Those of one rank begin at
/// whole [blocks](super::BLOCK) of the parameter, unless there are none.
#[derive(Debug)]
pub(crate) struct ShardMap {
    /// The beginning of each rank's part, and the end of the last one, by parameter.
    bounds: Vec<Vec<usize>>,
    /// The identity of the optimizer that has settled them.
    owner: Arc<()>,
    ranks: usize,
}

impl ShardMap {
    pub(crate) fn new(bounds: Vec<Vec<usize>>, ranks: usize, owner: &Arc<()>) -> Self {
        Self {
            bounds,
            owner: owner.clone(),
            ranks,
        }
    }

    /// Returns `true` if they are those of that optimizer.
    pub(crate) fn are_of(&self, owner: &Arc<()>) -> bool {
        Arc::ptr_eq(&self.owner, owner)
    }

    pub(super) fn range(&self, parameter: usize, rank: usize) -> Range<usize> {
        let bounds = &self.bounds[parameter];
        bounds[rank]..bounds[rank + 1]
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }
}

/// The division of a layout's sums among the ranks.
#[derive(Debug)]
pub(super) struct BucketShards {
    pub(super) bounds: Arc<ShardMap>,
    /// The elements that each rank gets, by bucket.
    pub(super) buckets: Vec<Arc<ShardLayout>>,
}

/// The sums of a window that a rank has.
#[derive(Clone, Debug)]
pub(super) enum SumScope {
    Whole,
    /// Whole sums of most parameters; of the rest, sums of this rank's pieces. The other ranks of `group` have the
    /// other pieces.
    Pieces {
        group: ProcessGroup,
    },
    /// Its own part. The others are in the group.
    Own {
        cuts: Arc<BucketShards>,
        group: ProcessGroup,
    },
}

impl SumScope {
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Self::Whole)
    }

    /// Returns the group whose ranks have other sums.
    pub(super) fn group(&self) -> Option<&ProcessGroup> {
        match self {
            Self::Whole => None,
            Self::Pieces { group } | Self::Own { group, .. } => Some(group),
        }
    }

    pub(super) fn bounds(&self) -> Option<&Arc<ShardMap>> {
        match self {
            Self::Whole | Self::Pieces { .. } => None,
            Self::Own { cuts, .. } => Some(&cuts.bounds),
        }
    }

    /// Returns the elements of a bucket that each rank gets, if that is not all.
    pub(super) fn cut(&self, bucket: usize) -> Option<&Arc<ShardLayout>> {
        match self {
            Self::Whole | Self::Pieces { .. } => None,
            Self::Own { cuts, .. } => Some(&cuts.buckets[bucket]),
        }
    }

    /// Returns the elements that this rank has of a parameter.
    pub(super) fn of_parameter(&self, parameter: usize, elements: usize) -> Range<usize> {
        match self {
            Self::Whole | Self::Pieces { .. } => 0..elements,
            Self::Own { cuts, group } => cuts.bounds.range(parameter, group.rank()),
        }
    }

    /// Returns the elements that this rank has of a bucket.
    pub(super) fn of_bucket(
        &self,
        bucket: usize,
        elements: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let (own, whole) = match self {
            Self::Whole | Self::Pieces { .. } => (&[][..], Some(0..elements)),
            Self::Own { cuts, group } => (cuts.buckets[bucket].of(group.rank()), None),
        };
        own.iter().cloned().chain(whole)
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;
    use proptest::prelude::*;

    use super::*;

    fn parameters(sizes: &[usize], float: Float) -> Vec<Trainable> {
        sizes
            .iter()
            .map(|&size| Trainable {
                id: ParamId::new(),
                path: String::new(),
                shape: vec![size],
                float,
                piece: None,
            })
            .collect()
    }

    #[test]
    fn the_first_bucket_is_small_and_holds_the_last_parameters() {
        let parameters = parameters(&[3 << 20, 100_000, 200_000], Float::F32);
        let buckets = BucketLayout::new(&parameters, &ReadyOrder::reversed(3), 25 << 20);
        assert_eq!(buckets.place(2).bucket, 0);
        assert_eq!(buckets.place(2).range, 0..200_000);
        // 300,000 × 4 bytes would be more than 1 MiB.
        assert_eq!(buckets.place(1).bucket, 1);
        assert_eq!(buckets.place(0).range.start, 100_000);
    }

    #[test]
    fn what_is_late_shares_no_bucket_with_what_is_early() {
        let mut parameters = parameters(&[10, 10, 10, 10], Float::F32);
        parameters[2].float = Float::F64;
        let order = ReadyOrder::of(&[None, Some(4), Some(2), Some(3)]);
        let buckets = BucketLayout::new(&parameters, &order, 1024);
        assert_eq!(buckets.len(), 3);
        assert_eq!(buckets.members(0), [1, 3]);
        assert_eq!(buckets.members(1), [2]);
        assert_eq!(buckets.members(2), [0]);
    }

    #[test]
    fn a_bucket_that_is_worth_it_does_not_wait_for_what_is_ready_later() {
        // A classifier: a small last layer, a large one, and two convolutions.
        let parameters = parameters(&[10_000, 20_000, 1 << 20, 1000, 500], Float::F32);
        let order = ReadyOrder::of(&[Some(1), Some(2), Some(7), Some(8), Some(7)]);
        let buckets = BucketLayout::new(&parameters, &order, 25 << 20);
        assert_eq!(buckets.len(), 3);
        assert_eq!(buckets.members(0), [3, 4]);
        assert_eq!(buckets.members(1), [2]);
        assert_eq!(buckets.members(2), [1, 0]);
    }

    proptest! {
        #[test]
        fn places_do_not_overlap_and_fill_the_buckets(
            sizes in proptest::collection::vec(0_usize..5000, 1..40),
            ready in proptest::collection::vec(proptest::option::of(0_usize..9), 40),
            limit in 1024_usize..40_000,
        ) {
            let mut parameters = parameters(&sizes, Float::F32);
            for parameter in parameters.iter_mut().step_by(3) {
                parameter.float = Float::F64;
            }
            let order = ReadyOrder::of(&ready[..sizes.len()]);
            let buckets = BucketLayout::new(&parameters, &order, limit);
            let mut covered = vec![0; buckets.len()];
            for &index in &order.parameters {
                let place = buckets.place(index);
                prop_assert_eq!(place.range.len(), sizes[index]);
                prop_assert_eq!(place.range.start, covered[place.bucket]);
                prop_assert!(buckets.members(place.bucket).contains(&index));
                covered[place.bucket] = place.range.end;
                let alone = place.range.start == 0;
                let bytes = place.range.end * width(dtype_of(parameters[index].float));
                prop_assert!(alone || bytes <= limit);
            }
            let lengths: Vec<_> = buckets.buckets.iter().map(|bucket| bucket.length).collect();
            prop_assert_eq!(covered, lengths);
            for bucket in &buckets.buckets {
                let first = ready[bucket.members[0]].is_some();
                prop_assert!(bucket.members.iter().all(|&at| ready[at].is_some() == first));
            }
        }
    }
}
