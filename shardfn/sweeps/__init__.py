"""What-if: one step on meshes, with strategies, options and hardware of several kinds, compared."""
