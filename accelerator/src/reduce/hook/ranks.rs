use accelerator_collective::{Element, ProcessGroup, ReduceOp};

use crate::core::error::Result;

/// All ranks, as a [`CommunicationHook`](super::CommunicationHook) talks to them.
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

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Puts what the values of all ranks come to, element by element, in their place: the same bits on
    /// every rank.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost, or calls something
    /// else.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        Ok(self.group.all_reduce(values, op)?)
    }

    /// The values of all ranks, equally many of each, in rank order.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        Ok(self.group.all_gather(values)?)
    }

    /// The values of each rank, by rank, which may be more of one than of another.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather_varied<T: Element>(&self, values: &[T]) -> Result<Vec<Vec<T>>> {
        Ok(self.group.all_gather_varied(values)?)
    }

    /// The group underneath, for operations that this type has no method for.
    pub fn group(&self) -> &'a ProcessGroup {
        self.group
    }
}
