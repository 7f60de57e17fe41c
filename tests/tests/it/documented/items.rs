//! A public item, and where it is used.

use std::fmt;

use super::blocks;
use super::modules::ModulePath;

/// A public item, at the shortest path that leads to it.
pub(crate) struct Item {
    path: String,
    name: String,
    kind: Kind,
    /// Where it is defined, with its type for what belongs to one.
    defined: (ModulePath, String),
    is_documented: bool,
    blocks: Vec<String>,
    module_blocks: Vec<String>,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Module,
    /// A type, a trait, a constant.
    Name,
    Function,
    Macro,
    /// A method with a receiver.
    Method,
    /// A method of a trait, which is called or implemented.
    TraitMethod,
    /// What is written after its type: a function without a receiver, a constant, a variant.
    Associated,
    Field,
}

impl Item {
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn is_documented(&self) -> bool {
        self.is_documented
    }

    pub(crate) fn needs_example(&self) -> bool {
        self.kind != Kind::Module
    }

    /// The code blocks of its own documentation.
    pub(crate) fn blocks(&self) -> &[String] {
        &self.blocks
    }

    /// The code blocks of the modules that it is defined in, or reached by.
    pub(crate) fn module_blocks(&self) -> &[String] {
        &self.module_blocks
    }

    pub(crate) fn is_of_the_type_of(&self, other: &Self) -> bool {
        self.defined == other.defined
    }

    pub(crate) fn is_used_in(&self, code: &str) -> bool {
        let owner = &self.defined.1;
        let is_called = |after: &str| after.starts_with('(') || after.starts_with("::<");
        let after_owner = |before: &str| {
            let Some(path) = before.strip_suffix("::") else {
                return false;
            };
            path.ends_with('>') || blocks::places(path, owner).any(|(_, after)| after.is_empty())
        };
        blocks::places(code, &self.name).any(|(before, after)| match self.kind {
            Kind::Module => false,
            Kind::Name | Kind::Field => true,
            Kind::Function => is_called(after) && !before.ends_with('.'),
            Kind::Macro => after.starts_with('!'),
            Kind::Method => before.ends_with('.') && is_called(after) || after_owner(before),
            Kind::TraitMethod => {
                is_called(after) && before.ends_with('.')
                    || before.ends_with("::")
                    || before.ends_with("fn")
            }
            Kind::Associated => after_owner(before),
        })
    }

    pub(crate) fn new(
        parents: &[String],
        path: &str,
        kind: Kind,
        docs: &str,
        defined: (ModulePath, String),
    ) -> Self {
        Self {
            path: path.to_owned(),
            name: path.rsplit("::").next().unwrap_or_default().to_owned(),
            kind,
            defined,
            is_documented: !docs.trim().is_empty(),
            blocks: blocks::compiled(docs),
            module_blocks: parents
                .iter()
                .flat_map(|docs| blocks::compiled(docs))
                .collect(),
        }
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = [&["crate".to_owned()], &*self.defined.0].concat();
        write!(f, "{} (in {})", self.path, module.join("::"))
    }
}
