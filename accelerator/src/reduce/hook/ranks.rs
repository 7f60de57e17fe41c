use accelerator_collective::{Element, ProcessGroup, ReduceOp};

use crate::core::error::Result;

/// All ranks, as a [`CommunicationHook`](super::CommunicationHook) talks to them.
///
/// Every rank calls the same methods with as many values, in one order; where they do not, all of them get
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
///
/// One by which each rank sends what is large, as places and values:
///
/// ```
/// use accelerator::hook::{BucketValues, CommunicationHook, GradientBucket, HookError, Ranks};
///
/// struct Sparse;
///
/// impl CommunicationHook for Sparse {
///     fn name(&self) -> String {
///         "what is above the mean magnitude".to_owned()
///     }
///
///     fn reduce(&mut self, bucket: &mut GradientBucket<'_>, ranks: &Ranks<'_>) -> Result<(), HookError> {
///         let BucketValues::F32(values) = bucket.values_mut() else {
///             return Err("only f32 is expected".into());
///         };
///         let sum: f32 = values.iter().map(|value| value.abs()).sum();
///         // The sums of all ranks, as many as there are ranks.
///         let sums = ranks.all_gather(&[sum])?;
///         let mean = sums.iter().sum::<f32>() / (ranks.world_size() * values.len()) as f32;
///         let places: Vec<u32> = (0..).zip(&*values).filter(|(_, v)| v.abs() >= mean).map(|(i, _)| i).collect();
///         let sent: Vec<f32> = places.iter().map(|&place| values[place as usize]).collect();
///         values.fill(0.0);
///         let all = ranks.all_gather_varied(&places)?.into_iter().zip(ranks.all_gather_varied(&sent)?);
///         for (places, sent) in all {
///             for (place, value) in places.into_iter().zip(sent) {
///                 values[place as usize] += value;
///             }
///         }
///         if ranks.rank() == 0 {
///             println!("{} values of {}, by {}", places.len(), values.len(), ranks.group().topology());
///         }
///         Ok(())
///     }
/// }
/// # let builder = accelerator::Accelerator::builder().communication_hook(|| Sparse);
/// # let sums = builder.launch(2, |accelerator| {
/// #     use burn::{nn::{Linear, LinearConfig}, tensor::Tensor};
/// #     let device = accelerator.device();
/// #     let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
/// #     let input = Tensor::<2>::from_data([[5.0, 0.5]], &device);
/// #     Ok(accelerator.backward(model.forward(input).mean(), &model, 1)?.norm_of_order(1.0))
/// # })?;
/// # assert_eq!(sums, [Some(5.0); 2], "one of three is above their mean");
/// # Ok::<(), accelerator::Error>(())
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

    /// How many there are.
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
