"""How a machine copies, lays out and multiplies a tile: equal members per machine."""
