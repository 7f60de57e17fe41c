use core::ops::Range;

use accelerator_collective::{Buffer, Element, ProcessGroup, ReduceOp};

use crate::core::error::Result;
use crate::model::Trainable;

/// A bucket of gradients that are reduced together; a [`CommunicationHook`](super::CommunicationHook) gets it.
///
/// A hook that halves what embeddings learn:
///
/// ```
/// use accelerator::hook::{BucketValues, CommunicationHook, GradientBucket, HookError, Ranks};
///
/// struct Halved;
///
/// impl CommunicationHook for Halved {
///     fn name(&self) -> String {
///         "embeddings halved".to_owned()
///     }
///
///     fn reduce(
///         &mut self,
///         bucket: &mut GradientBucket<'_>,
///         ranks: &Ranks<'_>,
///     ) -> Result<(), HookError> {
///         let (parameters, values) = bucket.parts_mut();
///         if let BucketValues::F32(values) = values {
///             for parameter in parameters.iter().filter(|p| p.path.starts_with("embedding.")) {
///                 values[parameter.range.clone()].iter_mut().for_each(|value| *value *= 0.5);
///             }
///         }
///         Ok(bucket.all_reduce(ranks)?)
///     }
/// }
/// # let model = |accelerator: accelerator::Accelerator| -> accelerator::Result<_> {
/// #     use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::Tensor};
/// #     #[derive(Debug, Module)]
/// #     struct Net { embedding: Linear, head: Linear }
/// #     let device = accelerator.device();
/// #     let layer = || LinearConfig::new(1, 1).init(&device);
/// #     let model: Net = accelerator.prepare(Net { embedding: layer(), head: layer() })?;
/// #     let input = Tensor::<2>::ones([1, 1], &device);
/// #     let loss = (model.embedding.forward(input.clone()) + model.head.forward(input)).mean();
/// #     Ok(accelerator.backward(loss, &model, 1)?.norm_of_order(1.0))
/// # };
/// # let builder = accelerator::Accelerator::builder().communication_hook(|| Halved);
/// # let norms = builder.launch(2, model)?;
/// # assert_eq!(norms, [Some(3.0); 2]);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientBucket<'a> {
    buffer: &'a mut Buffer,
    count: usize,
    number: usize,
    parameters: Vec<BucketParameter<'a>>,
    step: u64,
}

/// The place of the gradient of a parameter in its bucket.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BucketParameter<'a> {
    /// The path of the parameter in its model. It identifies the parameter even if buckets are laid out differently.
    pub path: &'a str,
    /// Its shape; elements lie in row-major order.
    pub shape: &'a [usize],
    /// The positions of its elements among the values of the bucket.
    pub range: Range<usize>,
    /// Set if any rank has a gradient for it in this step. Otherwise, its values are zeros on all ranks, and the
    /// result is ignored.
    pub is_present: bool,
}

/// The values of a bucket. Half-precision gradients are reduced in `f32`.
#[derive(Debug)]
pub enum BucketValues<'a> {
    /// The values of parameters in `f32` or less.
    F32(&'a mut [f32]),
    /// The values of parameters in `f64`.
    F64(&'a mut [f64]),
}

impl<'a> BucketParameter<'a> {
    pub(in crate::reduce) fn new(
        parameter: &'a Trainable,
        range: Range<usize>,
        is_present: bool,
    ) -> Self {
        Self {
            path: &parameter.path,
            shape: &parameter.shape,
            range,
            is_present,
        }
    }
}

impl<'a> GradientBucket<'a> {
    /// The bucket of that number out of `count`, which holds f32 or f64.
    pub(in crate::reduce) fn new(
        buffer: &'a mut Buffer,
        number: usize,
        count: usize,
        step: u64,
        parameters: Vec<BucketParameter<'a>>,
    ) -> Self {
        Self {
            buffer,
            count,
            number,
            parameters,
            step,
        }
    }

    /// Returns its number among the buckets of the model, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns the number of the model's buckets.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of steps of the model that were reduced before this one, over the whole job; it continues
    /// after a resume.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns its parameters in order; their ranges fill the bucket.
    pub fn parameters(&self) -> &[BucketParameter<'a>] {
        &self.parameters
    }

    /// Returns the values, to read and replace.
    pub fn values_mut(&mut self) -> BucketValues<'_> {
        self.parts_mut().1
    }

    /// The parameters and the values, at once.
    #[expect(
        clippy::expect_used,
        reason = "buckets hold f32 or f64, see `BucketLayout`"
    )]
    pub fn parts_mut(&mut self) -> (&[BucketParameter<'a>], BucketValues<'_>) {
        // Asked first: an unsuccessful look would hold the borrow.
        let values = if self.buffer.as_slice::<f64>().is_ok() {
            BucketValues::F64(self.buffer.as_mut_slice().expect("it holds f64"))
        } else {
            BucketValues::F32(self.buffer.as_mut_slice().expect("it holds f32"))
        };
        (&self.parameters, values)
    }

    /// Replaces the values by the exact sum over all ranks, as happens without a hook, and as fast.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn all_reduce(&mut self, ranks: &Ranks<'_>) -> Result<()> {
        Ok(ranks
            .group()
            .all_reduce_buffer(self.buffer, ReduceOp::Sum)?)
    }
}

/// The connection of a [`CommunicationHook`](super::CommunicationHook) to all ranks.
///
/// Every rank calls the same methods with as many values, in one order; if they do not, all of them get
/// an error that says so.
///
/// A hook by which ranks vote on signs (Bernstein et al. 2018, "signSGD with Majority Vote"):
///
/// ```
/// use accelerator::hook::{BucketValues, CommunicationHook, GradientBucket, HookError, Ranks};
/// use accelerator::prelude::*;
///
/// struct Vote;
///
/// impl CommunicationHook for Vote {
///     fn name(&self) -> String {
///         "majority vote".to_owned()
///     }
///
///     fn reduce(
///         &mut self,
///         bucket: &mut GradientBucket<'_>,
///         ranks: &Ranks<'_>,
///     ) -> core::result::Result<(), HookError> {
///         let BucketValues::F32(values) = bucket.values_mut() else {
///             return Err("only f32 is expected".into());
///         };
///         values.iter_mut().for_each(|value| *value = value.signum());
///         ranks.all_reduce(values, ReduceOp::Sum)?;
///         values.iter_mut().for_each(|sum| *sum = sum.clamp(-1.0, 1.0));
///         Ok(())
///     }
/// }
/// # let builder = Accelerator::builder().communication_hook(|| Vote);
/// # let largest = builder.launch(2, |accelerator| {
/// #     use burn::{nn::{Linear, LinearConfig}, tensor::Tensor};
/// #     let device = accelerator.device();
/// #     let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
/// #     let loss = model.forward(Tensor::<2>::ones([4, 2], &device) * 5.0).mean();
/// #     Ok(accelerator.backward(loss, &model, 4)?.norm_of_order(f64::INFINITY))
/// # })?;
/// # assert_eq!(largest, [Some(1.0); 2]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Ranks<'a> {
    group: &'a ProcessGroup,
}

impl<'a> Ranks<'a> {
    pub(in crate::reduce) fn new(group: &'a ProcessGroup) -> Self {
        Self { group }
    }

    /// Returns the number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Replaces the values by their reduction over all ranks, element by element: the same bits on every rank.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost, or calls something
    /// else.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        Ok(self.group.all_reduce(values, op)?)
    }

    /// Returns the values of all ranks, in rank order. Every rank must pass equally many.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        Ok(self.group.all_gather(values)?)
    }

    /// Returns the underlying group, for operations that have no method here.
    pub fn group(&self) -> &'a ProcessGroup {
        self.group
    }
}
