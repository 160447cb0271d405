"""kt beside other engines: same shapes, same bits, random weights, interleaved in one run."""
