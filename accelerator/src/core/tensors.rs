//! Structures of tensors: the inputs of collectives, and of the units of a model.

use core::any::Any;
use std::collections::BTreeMap;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;

use crate::core::error::Result;

/// Tensors, alone or in tuples, arrays, vectors, options and maps, for collectives and units. In a collective, every
/// rank must pass the same structure.
///
/// ```
/// use accelerator::prelude::*;
/// use burn::tensor::{Int, Tensor};
///
/// let gathered = launch(2, |accelerator| {
///     let logits = Tensor::<2>::full([1, 3], accelerator.rank() as f64, &accelerator.device());
///     let labels = Tensor::<1, Int>::full([1], accelerator.rank() as i64, &accelerator.device());
///     let (logits, labels) = accelerator.gather((logits, labels))?;
///     Ok((logits.dims(), labels.dims()))
/// })?;
/// assert_eq!(gathered, [([2, 3], [2]); 2]);
/// # Ok::<(), Error>(())
/// ```
pub trait Tensors: Sized {
    /// Applies `map` to each tensor in order, and returns the results in the same structure.
    #[doc(hidden)]
    fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self>;
}

/// A function that is applied to each tensor of a structure.
#[doc(hidden)]
pub trait TensorMap {
    fn map<const D: usize, K: Basic + 'static>(
        &mut self,
        tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>>;
}

impl<const D: usize, K: Basic + 'static> Tensors for Tensor<D, K> {
    #[track_caller]
    fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self> {
        map.map(self)
    }
}

impl Tensors for () {
    fn map_tensors(self, _: &mut impl TensorMap) -> Result<Self> {
        Ok(())
    }
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
    #[track_caller]
    fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self> {
        let mut mapped = Vec::with_capacity(N);
        for tensors in self {
            mapped.push(tensors.map_tensors(map)?);
        }
        let mut mapped = mapped.into_iter();
        #[expect(clippy::expect_used, reason = "there is one for each element")]
        Ok(core::array::from_fn(|_| {
            mapped.next().expect("a mapped element")
        }))
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    #[track_caller]
    fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self> {
        let mut mapped = Self::with_capacity(self.len());
        for tensors in self {
            mapped.push(tensors.map_tensors(map)?);
        }
        Ok(mapped)
    }
}

impl<T: Tensors> Tensors for Option<T> {
    #[track_caller]
    fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self> {
        match self {
            Some(tensors) => Ok(Some(tensors.map_tensors(map)?)),
            None => Ok(None),
        }
    }
}

impl<N: Ord, T: Tensors> Tensors for BTreeMap<N, T> {
    #[track_caller]
    fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self> {
        let mut mapped = Self::new();
        for (name, tensors) in self {
            mapped.insert(name, tensors.map_tensors(map)?);
        }
        Ok(mapped)
    }
}

macro_rules! tuples {
    ($($part:ident),+) => {
        impl<$($part: Tensors),+> Tensors for ($($part,)+) {
            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            #[track_caller]
            fn map_tensors(self, map: &mut impl TensorMap) -> Result<Self> {
                let ($($part,)+) = self;
                Ok(($($part.map_tensors(map)?,)+))
            }
        }
    };
}

tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);

/// Applies `map` to each float tensor, in order; other tensors stay as they are.
pub(crate) fn map_floats<T: Tensors>(
    tensors: T,
    map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor,
) -> T {
    #[expect(clippy::expect_used, reason = "`FloatMap` never fails")]
    tensors
        .map_tensors(&mut FloatMap(map))
        .expect("a mapped tensor")
}

struct FloatMap<'a>(&'a mut dyn FnMut(DispatchTensor) -> DispatchTensor);

impl TensorMap for FloatMap<'_> {
    fn map<const D: usize, K: Basic + 'static>(
        &mut self,
        mut tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        if let Some(floats) = (&mut tensor as &mut dyn Any).downcast_mut::<Tensor<D>>() {
            let mapped = (self.0)(floats.clone().into_dispatch());
            *floats = Tensor::from_dispatch(mapped);
        }
        Ok(tensor)
    }
}
