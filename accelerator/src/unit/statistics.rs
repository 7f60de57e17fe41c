//! The running statistics of a block that runs twice.

use std::collections::HashSet;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::core::dyn_module::BoxedModule;
use crate::model::{running_states, settle_statistics};

/// The running statistics of a block, as they are when it runs for the first time. All clones of a block share them.
pub(super) struct Statistics {
    block: BoxedModule,
    /// Their places among the float tensors of the block.
    places: HashSet<usize>,
    before: Vec<DispatchTensor>,
}

impl Statistics {
    /// Returns `None` for a block that has none.
    pub(super) fn of(block: &BoxedModule) -> Option<Self> {
        let places = running_states(block);
        if places.is_empty() {
            return None;
        }
        let block = block.clone();
        let before = read(&block, &places);
        Some(Self {
            block,
            places,
            before,
        })
    }

    /// Runs the block for the second time: on the statistics of the first, and without an effect on those of the model.
    pub(super) fn again<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Restore<'a>(&'a Statistics, Vec<DispatchTensor>);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                // What the block has just added would be taken over later.
                settle_statistics(&self.0.block);
                self.0.write(&self.1);
            }
        }
        settle_statistics(&self.block);
        let _restore = Restore(self, read(&self.block, &self.places));
        self.write(&self.before);
        run()
    }

    fn write(&self, values: &[DispatchTensor]) {
        self.block.clone().map(&mut Writer {
            places: &self.places,
            place: 0,
            values: values.iter(),
        });
    }
}

fn read(block: &BoxedModule, places: &HashSet<usize>) -> Vec<DispatchTensor> {
    struct Reader<'a> {
        places: &'a HashSet<usize>,
        place: usize,
        values: Vec<DispatchTensor>,
    }
    impl ModuleVisitor for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.places.contains(&self.place) {
                self.values.push(param.base().into_dispatch());
            }
            self.place += 1;
        }
    }
    let mut reader = Reader {
        places,
        place: 0,
        values: Vec::new(),
    };
    block.visit(&mut reader);
    reader.values
}

struct Writer<'a> {
    places: &'a HashSet<usize>,
    place: usize,
    values: core::slice::Iter<'a, DispatchTensor>,
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_one = self.places.contains(&self.place);
        self.place += 1;
        match is_one.then(|| self.values.next()).flatten() {
            Some(value) => {
                let (id, _, mapper) = param.consume();
                Param::from_mapped_value(id, Tensor::from_dispatch(value.clone()), mapper)
            }
            None => param,
        }
    }
}
