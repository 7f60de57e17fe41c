use core::fmt;
use std::sync::{Arc, Weak};

use accelerator_host::sync::Mutex;
use burn::backend::DispatchTensor;
use burn::tensor::{DType, FloatDType, Tensor};

use crate::core::autodiff::{self, Node, NodeContext};

/// The cast of a parameter inside the graph, which keeps what it made of the gradient: so it can be told
/// without a look at values whether a gradient in full precision is that of one in half precision.
#[derive(Default)]
pub(crate) struct Cast(Mutex<Option<CastPair>>);

struct CastPair {
    half: DispatchTensor,
    full: DispatchTensor,
}

impl Cast {
    /// `value`, in that type of half precision, and the cast that backward comes to; `None` if it is Burn's
    /// own.
    ///
    /// It is where that of a gradient rounds, as from bf16 to f16: whoever sees one before the cast must be able
    /// to tell what comes of it, which is the same value where it is widened.
    pub(crate) fn of<const D: usize>(
        value: Tensor<D>,
        dtype: FloatDType,
    ) -> (Tensor<D>, Option<Arc<Self>>) {
        let full = value.dtype();
        let parent = value.clone().into_dispatch();
        let widens = matches!(full, DType::F64 | DType::F32 | DType::Flex32);
        if !widens || !autodiff::serves(&Tensor::from_dispatch(parent.clone())) {
            return (value.cast(dtype), None);
        }
        let cast = Arc::new(Self::default());
        let back = CastBackward {
            cast: Arc::downgrade(&cast),
            full,
        };
        let half = Tensor::from_inner(value.inner().cast(dtype));
        let half = autodiff::above(parent, half.into_dispatch(), Arc::new(back));
        (Tensor::from_dispatch(half), Some(cast))
    }

    /// Returns `true` if `half` was cast to `full`, by `same`, which compares memory. It can be asked once.
    pub(crate) fn has_made(
        &self,
        full: &DispatchTensor,
        half: &DispatchTensor,
        same: impl Fn(&DispatchTensor, &DispatchTensor) -> bool,
    ) -> bool {
        let made = self.0.lock().take();
        made.is_some_and(|made| same(&made.half, half) && same(&made.full, full))
    }
}

struct CastBackward {
    /// The record of the cast, if it will be asked for.
    cast: Weak<Cast>,
    full: DType,
}

impl Node for CastBackward {
    fn backward(&self, here: &mut dyn NodeContext) {
        here.hand_on_as(&|half| {
            let full = Tensor::<1>::from_dispatch(half.clone()).cast(self.full);
            let full = full.into_dispatch();
            if let Some(cast) = self.cast.upgrade() {
                let mut made = cast.0.lock();
                *made = Some(CastPair {
                    half,
                    full: full.clone(),
                });
            }
            full
        });
    }
}

impl fmt::Debug for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cast")
    }
}

impl fmt::Debug for CastBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Back({:?})", self.full)
    }
}
