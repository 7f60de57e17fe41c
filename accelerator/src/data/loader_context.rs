use accelerator_collective::TransportKind;

use crate::context::Context;

/// The rank, the world and the loader of a share.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoaderContext {
    pub(super) generator: Generator,
    pub(super) number: u64,
    pub(super) rank: usize,
    pub(super) seed: u64,
    pub(super) world_size: usize,
}

/// The generator from which a rank draws: one of its own, or one that ranks share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Generator {
    Own,
    /// Ranks are threads of one process.
    Shared,
}

impl LoaderContext {
    pub(super) fn of(context: &Context) -> Self {
        let are_threads = context.group().transport() == TransportKind::Threads;
        Self {
            generator: match are_threads && context.world_size() > 1 {
                true => Generator::Shared,
                false => Generator::Own,
            },
            number: context.next_loader(),
            rank: context.rank(),
            seed: context.seed,
            world_size: context.world_size(),
        }
    }
}
