//! A model in a struct, beside what steps it.

/// A model that steps replace: they take it, so that the optimizer updates it where it lies.
pub(super) struct ModelCell<M>(Option<M>);

impl<M> ModelCell<M> {
    pub(super) fn new(model: M) -> Self {
        Self(Some(model))
    }

    #[expect(
        clippy::expect_used,
        reason = "`replace` alone takes it, and puts one back unless it panics"
    )]
    pub(super) fn get(&self) -> &M {
        self.0.as_ref().expect("a model")
    }

    #[expect(
        clippy::expect_used,
        reason = "`replace` alone takes it, and puts one back unless it panics"
    )]
    pub(super) fn get_mut(&mut self) -> &mut M {
        self.0.as_mut().expect("a model")
    }

    #[expect(
        clippy::expect_used,
        reason = "`replace` alone takes it, and puts one back unless it panics"
    )]
    pub(super) fn replace(&mut self, by: impl FnOnce(M) -> M) {
        let model = self.0.take().expect("a model");
        self.0 = Some(by(model));
    }
}
