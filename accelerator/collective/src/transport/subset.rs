//! The members of a group.

use std::{fmt, sync::Arc};

use crate::error::list_ranks;
use crate::wire::GroupId;

/// The members of a group, in its order, and the number that its frames carry.
#[derive(Clone, Debug)]
pub(crate) struct Subset {
    pub(crate) id: GroupId,
    pub(crate) members: Arc<[usize]>,
    /// The members in words.
    name: Arc<str>,
}

impl Subset {
    pub(crate) fn new(id: GroupId, members: Vec<usize>) -> Self {
        Self {
            id,
            name: list_ranks(&members).into(),
            members: members.into(),
        }
    }
}

/// "ranks 0 and 2".
impl fmt::Display for Subset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
