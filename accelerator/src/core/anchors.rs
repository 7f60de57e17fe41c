//! Tensors of chosen depths in Burn's graph.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Device, Tensor};

use super::autodiff::{HandOn, above};

/// Tensors of chosen depths that need no gradient: in backward, a node placed above one of them runs at its depth.
///
/// A node of Burn's graph is one deeper than its deepest parent, tracked or not, and backward runs from the deepest
/// to the shallowest. Untracked nodes take no part in backward, so a chain of them is made once and can be reused.
/// There is one chain for each device and checkpointing strategy, because Burn does not mix these.
#[derive(Debug, Default)]
pub(crate) struct Anchors {
    chains: Vec<Chain>,
}

/// Anchors on one device.
#[derive(Debug)]
pub(crate) struct Chain {
    device: Device,
    /// A parent that makes its children tracked.
    pub(crate) leaf: DispatchTensor,
    /// The tensors by depth. The one of depth 0 is always there.
    made: BTreeMap<usize, DispatchTensor>,
    /// The number of nodes that were made.
    #[cfg(test)]
    nodes: usize,
}

impl Anchors {
    /// Returns the chain for tensors on `device`.
    pub(crate) fn on(&mut self, device: &Device) -> &mut Chain {
        let strategy = device.gradient_checkpointing_strategy();
        let known = self.chains.iter().position(|chain| {
            chain.device == *device && chain.device.gradient_checkpointing_strategy() == strategy
        });
        let known = known.unwrap_or_else(|| {
            self.chains.push(Chain::new(device.clone()));
            self.chains.len() - 1
        });
        &mut self.chains[known]
    }
}

impl Chain {
    fn new(device: Device) -> Self {
        let zero = || Tensor::<1>::zeros([1], &device);
        Self {
            leaf: zero().require_grad().into_dispatch(),
            made: BTreeMap::from([(0, zero().into_dispatch())]),
            #[cfg(test)]
            nodes: 0,
            device,
        }
    }

    /// Returns anchors of these depths, and forgets those of other depths.
    pub(crate) fn at(&mut self, depths: &[usize]) -> Vec<DispatchTensor> {
        // Each stands on the next shallower one: from the deepest on, each would be made of a chain of its own.
        let mut ascending = depths.to_vec();
        ascending.sort_unstable();
        for depth in ascending {
            self.make(depth);
        }
        let anchors = depths.iter().map(|&depth| self.make(depth)).collect();
        self.made
            .retain(|depth, _| *depth == 0 || depths.contains(depth));
        anchors
    }

    /// Returns the anchor of this depth.
    pub(crate) fn make(&mut self, depth: usize) -> DispatchTensor {
        let nearest = self.made.range(..=depth).next_back();
        let Some((&from, anchor)) = nearest else {
            // Unreachable: the anchor of depth 0 always exists.
            return self.leaf.clone();
        };
        let mut anchor = anchor.clone();
        for _ in from..depth {
            #[cfg(test)]
            {
                self.nodes += 1;
            }
            anchor = above(anchor.clone(), anchor, Arc::new(HandOn));
        }
        self.made.insert(depth, anchor.clone());
        anchor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_of_many_depths_share_one_chain() {
        let mut chain = Chain::new(Device::default().autodiff());
        let deepest_first: Vec<usize> = (1..=20).rev().map(|place| place * 30).collect();
        assert_eq!(chain.at(&deepest_first).len(), 20);
        assert_eq!(chain.nodes, 600);
        chain.at(&[600, 45]);
        assert_eq!(chain.nodes, 615);
    }
}
